"""What a person reads in the UI."""

from dataclasses import replace

from tests.flows.small_run import SmallRun

from weighbridge.flows.artifacts import bill, hosts_table
from weighbridge.values import HostOutcome


def test_the_weigh_bill_names_what_changed_and_what_it_weighs(run: SmallRun) -> None:
    manifest = replace(run.push(), labels={"step": 7, "note": "a|b\nc"})
    text = bill(manifest, {"encode": 0.25})
    ratio = manifest.model_bytes / manifest.wire_bytes
    for line in (
        f"## Version 1 of {run.run_id}",
        f"| changed | {manifest.changed_elements:,} of 6,144 elements ({manifest.changed_elements / 6144:.3%}) |",
        "| tensors | 3 of 3 |",
        f"| on the wire | {manifest.wire_bytes:,} bytes in 1 shard |",
        f"| a changed element | {manifest.wire_bytes / manifest.changed_elements:.2f} bytes |",
        f"| against the model | 1 : {ratio:,.0f} |",
        "| encode | 0.250 s |",
        "| label step | 7 |",
        "| label note | a\\|b c |",
    ):
        assert line in text.split("\n")


def test_the_weigh_bill_of_an_empty_version_divides_by_nothing(run: SmallRun) -> None:
    text = bill(run.push(changed=False), {})
    assert "| a changed element | nothing changed |" in text
    assert "(0.000%)" in text


def test_the_hosts_table_has_a_row_a_host_and_says_why_not() -> None:
    served = HostOutcome("a", "served", 3, {"fetch": 0.5, "apply": 0.25, "pause": 0.0, "reload": 2.0, "canary": 1.0})
    missed = HostOutcome("b", "missed", -1, {}, "it did not answer")
    assert hosts_table([served, missed]) == [
        {
            "host": "a",
            "outcome": "served",
            "serves": "3",
            "fetch": "0.500 s",
            "apply": "0.250 s",
            "pause": "0.000 s",
            "reload": "2.000 s",
            "why": "",
        },
        {"host": "b", "outcome": "missed", "serves": "?", "why": "it did not answer"},
    ]

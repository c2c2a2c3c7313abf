"""`weighbridge audit` on a root that trainers, hosts, anchors, gc and compactors have used."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.checkpoints import tiny_weights, trained
from tests.storage.publishing import Run, push
from tests.storage.test_records import record

from weighbridge.cli import main
from weighbridge.storage.history import compact as compacting
from weighbridge.storage.history import segments
from weighbridge.storage.records import write_record


def code(*words: object) -> object:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def test_a_changed_byte_in_any_file_of_a_used_store_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(segments, "BLOCK", 4)
    monkeypatch.setattr(compacting, "RECORDS_BEHIND", 2)
    run, weights = Run(tmp_path), tiny_weights()
    publisher = run.open()
    for version in range(1, 8):
        weights = trained(weights, version)
        made = push(publisher, weights, {"step": version})
        write_record(run.store, replace(record(version=version, ended=version), state_digest=made.state_digest))
    store = ("--store", run.store.url)
    assert code("anchor", *store, "--base", run.base, "--version", 5) == 0
    assert code("gc", *store, "--keep", 2, "--grace", 0) == 0
    assert code("compact", *store) == 0
    assert code("audit", *store) == 0
    keys = run.objects()
    for kind in ("anchor.arrow", "retired", "anchors/", "history/parts", "history/records", "hosts/", "run.json"):
        assert [key for key in keys if kind in key], kind
    for number, key in enumerate(keys):
        path = run.folder / "root" / key
        whole = path.read_bytes()
        place = number * 7919 % len(whole)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        capsys.readouterr()
        assert code("audit", *store) == 9
        assert f"broke at {key}: " in capsys.readouterr().err
        path.write_bytes(whole)

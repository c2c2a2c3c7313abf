"""`sync`: a checkpoint folder becomes the next version, as a push from a trainer would."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weighbridge import logs
from weighbridge.cli.options import Base, Json, Layout, LogJson, Run, Store, settings_of
from weighbridge.cli.report import print_json, print_line, share, size
from weighbridge.errors import UsageError


def sync(
    checkpoint: Path,
    *,
    store: Store = None,
    base: Base = None,
    hosts: Annotated[str | None, Parameter(help="Comma-separated names; none: publish alone.")] = None,
    run: Run = None,
    policy: str | None = None,
    sign: Path | None = None,
    cutover: str | None = None,
    layout: Layout = None,
    encode_on: str | None = None,
    encode_address: str | None = None,
    label: Annotated[tuple[str, ...], Parameter(help="key=value, kept with the version; repeatable.")] = (),
    json: Json = False,
    log_json: LogJson = False,
) -> None:
    """Publish a checkpoint folder as the next version, and roll it out to hosts.

    Parameters
    ----------
    checkpoint
        An HF folder with the base's tensors.
    policy
        Which hosts must make it: all, best-effort, or a share such as 0.5.
    cutover
        each: an engine changes over when its host is ready; together: all at once, when as many as the policy asks for
        are prepared.
    encode_on
        Where shards are encoded: threads (of this process), or dask or ray (extras of these names), whose workers see
        the checkpoint, the base and the store under the same names.
    encode_address
        The cluster's address; without one, a cluster of this machine's own for this sync.
    sign
        A private key (`weighbridge keygen`) to sign the version with; a run is signed from its first version on.
    """
    given = {"store": store, "base": base, "hosts": hosts, "run": run, "policy": policy}
    given |= {"cutover": cutover, "sign": sign, "layout": layout, "encode_on": encode_on}
    settings = settings_of(("store", "base"), **given, encode_address=encode_address)
    logs.to_stderr(json_lines=log_json or settings.log_json)
    from weighbridge.weight_sync import WeightSync

    names = ("run", "policy", "cutover", "sign", "layout", "encode_on", "encode_address")
    chosen = {name: getattr(settings, name) for name in names}
    with WeightSync(settings.store, settings.base, settings.hosts, **chosen) as front:
        result = front.push(checkpoint, labels=_labels(label), wait=True)
    if json:
        print_json(result)
        return
    print_line(
        f"version {result.version}: {result.outcome}, {result.changed_elements} elements changed "
        f"({share(result.density)}), {size(result.wire_bytes)} for a model of {size(result.model_bytes)}, "
        f"{result.seconds['total']:.2f} s"
    )
    for host in result.hosts:
        print_line(f"  {host.host}: {host.outcome}, serves version {host.version} {host.error}".rstrip())


def _labels(pairs: tuple[str, ...]) -> dict[str, str]:
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise UsageError(f"a label is key=value, not {', '.join(wrong)}. Nothing was published.")
    return dict(pair.split("=", 1) for pair in pairs)

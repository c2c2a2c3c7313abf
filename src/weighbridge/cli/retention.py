"""`gc`, `keep`, `release`: what stays in a store, and what goes."""

from typing import Annotated

from cyclopts import Parameter

from weighbridge import logs
from weighbridge.cli.options import Json, LogJson, Store, settings_of, store_of
from weighbridge.cli.report import print_json, print_line, print_table, size
from weighbridge.storage import kept
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.gc import distrusted, run_gc
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.retention import GcPlan, plan_gc


def gc(
    *,
    store: Store = None,
    keep: Annotated[int | None, Parameter(help="Keep the last so many versions.")] = None,
    grace: Annotated[float | None, Parameter(help="Seconds for which a silent host still holds what it needs.")] = None,
    dry_run: Annotated[bool, Parameter(name="--dry-run", negative=(), help="Only say what would go.")] = False,
    json: Json = False,
    log_json: LogJson = False,
) -> None:
    """Collect the shards of versions that nobody needs: not one of the last, not named, not in a live host's reach.

    Manifests stay, as fence, chain and history. What could not be deleted is named, and goes the next time; the exit
    code is then 5 (9 for a damaged anchor). Safe beside a running trainer, hosts, and other upkeep.
    """
    settings = settings_of(("store", "keep"), store=store, keep=keep, grace=grace)
    assert settings.keep is not None
    logs.to_stderr(json_lines=log_json or settings.log_json)
    lineage = Lineage(store_of(settings))
    _ = lineage.run  # a root without a run is an error, not an empty answer
    if dry_run:
        plan = plan_gc(lineage, keep=settings.keep, grace_seconds=settings.grace)
        _say(plan, json=json)
        return
    result = run_gc(lineage, keep=settings.keep, clock=SystemClock(), grace_seconds=settings.grace)
    if json:
        print_json(
            {
                "collected": list(map(str, result.collected)),
                "kept": sorted(result.plan.keeping.reasons),
                "deleted_objects": result.deleted_objects,
                "deleted_bytes": result.deleted_bytes,
                "leftovers": result.leftovers,
                "failures": result.failures,
            }
        )
    else:
        print_line(
            f"{len(result.collected)} collected, {size(result.deleted_bytes)} freed; "
            f"{len(result.plan.keeping.reasons)} versions are kept, and {result.leftovers} leftovers of dead attempts "
            "went"
        )
        for failure in result.failures:
            print_line(f"not yet: {failure}")
    result.demand()


def keep(version: int, name: str, *, store: Store = None, json: Json = False) -> None:
    """Keep a version under a name: gc leaves it, and all that leads to it, until the name is released.

    Parameters
    ----------
    version
        The version's number.
    name
        A name of its own: 1 to 64 of a-z A-Z 0-9 . _ -.
    """
    settings = settings_of(("store",), store=store)
    logs.to_stderr(json_lines=settings.log_json)
    made = kept.keep(Lineage(store_of(settings)), version, name, clock=SystemClock())
    print_json(made) if json else print_line(f"version {made.version} is kept as {made.name}")


def release(name: str, *, store: Store = None) -> None:
    """Give a name back that keeps a version; the next gc may collect it.

    Parameters
    ----------
    name
        The name.
    """
    settings = settings_of(("store",), store=store)
    logs.to_stderr(json_lines=settings.log_json)
    kept.release(store_of(settings), name)
    print_line(f"{name} is released")


def names(*, store: Store = None, json: Json = False) -> None:
    """The versions that are kept under names."""
    settings = settings_of(("store",), store=store)
    found = kept.kept_names(store_of(settings))
    if json:
        for one in found:
            print_json(one)
        return
    print_table(("name", "version"), ((one.name, one.version) for one in found))


def _say(plan: GcPlan, *, json: bool) -> None:
    failures = [distrusted(version, flaw) for version, flaw in sorted(plan.damaged.items())]
    if json:
        print_json(
            {
                "would_collect": [str(form) for form in plan.forms],
                "bytes": plan.nbytes,
                "kept": plan.keeping.reasons,
                "ways": {str(form): version for form, version in plan.keeping.ways.items()},
                "failures": failures,
            }
        )
        return
    for form in plan.forms:
        print_line(f"would collect {form}")
    print_line(f"{len(plan.forms)} would go, {size(plan.nbytes)}; nothing was changed")
    for version, reasons in sorted(plan.keeping.reasons.items()):
        print_line(f"keeps version {version}: {', '.join(reasons)}")
    for form, version in plan.keeping.ways.items():
        print_line(f"keeps {form}: it leads to version {version}")
    for failure in failures:
        print_line(f"trouble: {failure}")

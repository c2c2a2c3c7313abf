"""Where the encode step of a publish runs: in threads of this process, or on a Dask or Ray cluster by Prefect's own
task runners, which are extras. Must not know what a step does."""

from importlib.util import find_spec
from typing import Any

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from weighbridge.errors import UsageError
from weighbridge.storage.errand import Carrier, Elsewhere


def need_carrier(carrier: Carrier) -> None:
    """Raises UsageError unless the extra that brings a carrier is installed."""
    if find_spec(f"prefect_{carrier}") is None:
        raise UsageError(
            f"encode_on is {carrier!r}, and prefect-{carrier} is not installed: pip install 'weighbridge[{carrier}]', "
            "here and on the workers. Nothing was started."
        )


def task_runner(elsewhere: Elsewhere | None, *, threads: int) -> TaskRunner[Any]:
    """What a publish flow hands its steps to: `threads` encode and as many upload, or the workers of a cluster."""
    if elsewhere is None:
        return ThreadPoolTaskRunner(max_workers=2 * threads)
    own = elsewhere.address is None
    if elsewhere.carrier == "dask":
        from prefect_dask.task_runners import DaskTaskRunner

        here = {"n_workers": elsewhere.workers, "threads_per_worker": 1, "dashboard_address": None}
        dask: TaskRunner[Any] = DaskTaskRunner(address=elsewhere.address, cluster_kwargs=here if own else None)
        return dask
    from prefect_ray import RayTaskRunner

    started = {"num_cpus": elsewhere.workers, "include_dashboard": False}
    ray: TaskRunner[Any] = RayTaskRunner(address=elsewhere.address, init_kwargs=started if own else None)
    return ray

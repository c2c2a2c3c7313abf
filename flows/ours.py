"""What all our flows have in common: how Prefect treats what they return. Must not know any one flow."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect import Flow, flow

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_NOWHERE = Path(os.devnull)
"""Where results would be kept: a flow that names no place asks the server for one, at every run."""


def our_flow(
    *, name: str, flow_run_name: str, **more: Any
) -> Callable[[Callable[Parameters, Result]], Flow[Parameters, Result]]:
    """Prefect's `flow`, for one whose results are not kept: what became of it is in the store."""
    return flow(name=name, flow_run_name=flow_run_name, persist_result=False, result_storage=_NOWHERE, **more)

"""What a process brings to its runs stays there for as long as any of them needs it."""

from pathlib import Path

import pytest

from weighbridge.errors import OrchestrationError
from weighbridge.flows.context import base_here, store_here, using_store
from weighbridge.storage.stores import open_store


def test_a_rollout_that_ends_does_not_take_the_store_from_the_push_that_began_beside_it(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    earlier, later = using_store("overlapping", store, base=tmp_path), using_store("overlapping", store)
    earlier.__enter__()
    later.__enter__()
    earlier.__exit__(None, None, None)
    assert store_here("overlapping") is store
    assert base_here("overlapping") is None
    later.__exit__(None, None, None)
    with pytest.raises(OrchestrationError):
        store_here("overlapping")

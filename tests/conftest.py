"""What holds for every test: where events go, and who comes first."""

import pytest

from weighbridge import logs

# `structlog.testing.capture_logs` leaves structlog set up with its own defaults, which print to standard output.
logs.configure()

# Files whose tests start servers and processes, or take minutes: begun last, one of them would keep a worker busy
# while the others have nothing left.
_FIRST = ("tests/flows/", "tests/front/", "tests/simulator/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first (with `--no-loadscope-reorder`); the order is the same in every worker."""
    items.sort(key=lambda item: not item.nodeid.startswith(_FIRST))

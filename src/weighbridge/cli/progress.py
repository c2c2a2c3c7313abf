"""A progress bar for transfers, on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def showing(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that takes bytes done and bytes in all; what it shows goes to standard error."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

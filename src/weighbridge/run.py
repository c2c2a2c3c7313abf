"""A run as a reader opens it from Python: by its URL, without a trainer or Prefect."""

from dataclasses import dataclass

from weighbridge.storage.history.reader import History
from weighbridge.storage.stores import Profile, open_store
from weighbridge.storage.stores.contract import Store


@dataclass(frozen=True, slots=True)
class Run:
    """A run in a store: its id, and the store that holds it."""

    run_id: str
    store: Store

    def history(self) -> History:
        """What the store remembers, as of now, as Arrow tables: `versions()`, `parts()`, `records()`."""
        return History(self.store)


def open_run(url: str, *, profile: Profile | None = None) -> Run:
    """The run that a store holds; `profile` says how its endpoint is spoken to. Raises LineageError when it holds none,
    UsageError for a URL that is none."""
    store = open_store(url, profile=profile)
    return Run(History(store).lineage.run.run_id, store)

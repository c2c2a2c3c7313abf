"""A callback for transformers' `Trainer` and for what derives from it (TRL's trainers): pushes after optimizer steps.
Imports neither of them: they call a callback by the names of its events."""

from collections.abc import Callable
from typing import Any

from weighbridge.pending import PendingPush
from weighbridge.tasks.gather import Source
from weighbridge.weight_sync import WeightSync


def unwrapped(model: Any) -> Any:
    """The model within DistributedDataParallel and its like, whose names are those of the base."""
    while hasattr(model, "module"):
        model = model.module
    return model


class PushCallback:
    """Give it to `Trainer(callbacks=[...])`. Brings every host to the newest version before the first step, pushes
    after every `every_steps`-th optimizer step, and waits for the last push at the end.

    `export` makes what is pushed of the trainer's model: a state dict, or a generator where collectives are needed (a
    sharded model, an adapter to be merged). With `wait=False` hosts follow beside the next step, at most
    `allowed_staleness` versions behind. Every rank's trainer has one, as every rank pushes. `version` is the last one.
    """

    def __init__(
        self,
        sync: WeightSync,
        *,
        every_steps: int = 1,
        wait: bool = False,
        export: Callable[[Any], Source] = unwrapped,
    ) -> None:
        self.version = -1
        self._sync, self._every, self._wait, self._export = sync, every_steps, wait, export
        self._pending: PendingPush | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the run and brings the hosts along, while nothing trains yet. Raises what `warm` raises."""
        self._sync.warm()

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Pushes the weights of this step. Raises what `push` raises, and what the push before failed with."""
        if state.global_step % self._every:
            return
        source, labels = self._export(model), {"step": int(state.global_step)}
        if self._wait:
            self.version = self._sync.push(source, labels=labels).version
            return
        before, self._pending = self._pending, self._sync.push(source, labels=labels, wait=False)
        self.version = self._pending.version
        if before is not None and before.done():
            before.result()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits for the hosts' last version. Raises what that push failed with."""
        if self._pending is not None:
            self._pending.result()

    def __getattr__(self, name: str) -> Any:
        """Every other event: nothing to do."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)

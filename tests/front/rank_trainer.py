"""A trainer of several ranks, for tests: `torchrun ... -m tests.front.rank_trainer FOLDER`. Each scenario pushes to a
store of its own and says in FOLDER/<scenario>-<rank>.json what this rank saw."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from weighbridge import WeightSync
from weighbridge.storage.replica.image import MemoryImage

NAMES = [f"layers.{number}.weight" for number in range(12)] + ["lm_head.weight", "norm.weight"]
LATEST_SECONDS = 90.0


def tensors(step: int) -> dict[str, torch.Tensor]:
    """The whole model after a step, the same on every rank: rows that do not divide by the ranks, two dtypes."""
    made = {}
    for number, name in enumerate(NAMES):
        noise = torch.Generator().manual_seed(number)
        tensor = torch.randn((5 + number, 32), generator=noise).to(torch.bfloat16)
        tensor[:: number % 3 + 2] += step * 0.25
        made[name] = tensor
    made["norm.weight"] = torch.arange(7, dtype=torch.float32) + step
    return made


class Model(nn.Module):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 5 + n, bias=False, dtype=torch.bfloat16) for n in range(12))
        self.lm_head = nn.Linear(32, 17, bias=False, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(7, bias=False)
        self.load_state_dict(tensors(step))


class Trainer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def sync(self, scenario: str, **settings: Any) -> WeightSync:
        settings = {"rank_deadline": LATEST_SECONDS, "rank_grace": 30.0, "shard_bytes": 1 << 20, **settings}
        return WeightSync(self.folder / scenario, self.folder / "base", **settings)

    def held(self, sync: WeightSync) -> list[str]:
        """The tensors of which this rank has a snapshot."""
        assert sync._publisher is not None
        image = sync._publisher._snapshot.image
        assert isinstance(image, MemoryImage)
        return [name for name in image.specs if image.holds(name)]

    def failing(self, push: Callable[[], object]) -> dict[str, object]:
        started = time.monotonic()
        try:
            push()
        except Exception as error:  # noqa: BLE001 - whatever it is, is what the tests ask
            notes = " ".join(getattr(error, "__notes__", ()))
            return {"kind": type(error).__name__, "said": f"{error} {notes}", "seconds": time.monotonic() - started}
        return {"kind": None}

    def mine(self, step: int, by: int) -> dict[str, torch.Tensor]:
        """Every tensor on one rank; `by` moves them round."""
        return {n: t for i, (n, t) in enumerate(tensors(step).items()) if (i + by) % self.size == self.rank}

    # Scenarios

    def fsdp(self) -> object:
        """Parameters in rows over all ranks, as FSDP2 has them."""
        from torch.distributed.fsdp import fully_shard

        model, versions = Model(1), []
        for layer in [*model.layers, model.lm_head, model.norm]:
            fully_shard(layer)
        fully_shard(model)
        with self.sync("fsdp") as sync:
            sync.warm()
            versions.append(sync.push(model).version)
            for parameter, whole in zip(model.parameters(), Model(2).parameters(), strict=True):
                local = distribute_tensor(whole.detach(), parameter.device_mesh, [Shard(0)]).to_local()  # type: ignore[attr-defined]
                parameter.detach().to_local().copy_(local)  # type: ignore[attr-defined]
            result = sync.push(model, labels={"step": 2})
            return {"versions": [*versions, result.version], "wire": result.wire_bytes, "held": self.held(sync)}

    def meshes(self) -> object:
        """A mesh of two dimensions, replicas, columns, and plain tensors beside them."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        state: dict[str, torch.Tensor] = {}
        placements = [
            [Replicate(), Shard(0)],
            [Shard(0), Shard(1)],
            [Shard(1), Replicate()],
            [Replicate(), Replicate()],
        ]
        for number, (name, tensor) in enumerate(tensors(1).items()):
            if number % 5 == 4 or tensor.ndim < 2:
                state[name] = tensor
            else:
                state[name] = distribute_tensor(tensor, mesh, placements[number % 5])
        with self.sync("meshes") as sync:
            return {"versions": [sync.push(state).version], "held": self.held(sync)}

    def split(self) -> object:
        """Each tensor on one rank."""
        with self.sync("split") as sync:
            return {"versions": [sync.push(self.mine(step, 0)).version for step in (1, 2)], "held": self.held(sync)}

    def moved(self) -> object:
        """The same on other ranks, in another order."""
        with self.sync("moved") as sync:
            turned = [dict(reversed(self.mine(step, 1).items())) for step in (1, 2)]
            return {"versions": [sync.push(state).version for state in turned], "held": self.held(sync)}

    def stages(self) -> object:
        """A generator as Megatron's exporters are: two pipeline stages of two tensor-parallel ranks; a stage's ranks
        put each tensor together inside the generator, and only the first of them yields it."""
        groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
        stage, place = divmod(self.rank, 2)
        drained = []

        def export(step: int) -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, tensor) in enumerate(tensors(step).items()):
                if number % 2 != stage:
                    continue
                rows = tensor.shape[0] // 2
                half = tensor[:rows] if place == 0 else tensor[rows : rows * 2]
                halves = [torch.empty_like(half) for _ in range(2)]
                distributed.all_gather(halves, half.contiguous(), group=groups[stage])
                if place == 0:
                    yield name, torch.cat([*halves, tensor[rows * 2 :]])
                del halves
            drained.append(step)

        with self.sync("stages") as sync:
            versions = [sync.push(export(step)).version for step in (1, 2, 3)]
            return {"versions": versions, "held": self.held(sync), "drained": drained}

    def everywhere(self) -> object:
        """A generator that yields every tensor on every rank, after a collective for each."""

        def export(step: int) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors(step).items():
                together = tensor.clone() if self.rank == 0 else torch.zeros_like(tensor)
                distributed.broadcast(together, 0)
                yield name, together

        with self.sync("everywhere", snapshot="mmap") as sync:
            pending = [sync.push(export(step), wait=False) for step in (1, 2)]
            return {"versions": [one.result(LATEST_SECONDS).version for one in pending], "held": self.held(sync)}

    def replicas(self) -> object:
        """Everything on every rank; then one of them runs apart, and then not any more."""
        with self.sync("replicas") as sync:
            first = sync.push(tensors(1)).version
            apart = tensors(2)
            if self.rank == 3:
                apart["layers.4.weight"][2, 3] += 1
            refused = self.failing(lambda: sync.push(apart))
            streamed = self.failing(lambda: sync.push(iter(apart.items())))
            versions = [first, sync.push(tensors(2)).version]
            return {"versions": versions, "refused": refused, "streamed": streamed, "held": self.held(sync)}

    def unfit(self) -> object:
        """What is wrong on one rank, or on none alone, is wrong on all."""
        with self.sync("unfit") as sync:
            state = self.mine(1, 0)
            if self.rank == 2:
                state["stranger"] = torch.zeros(3)
            stranger = self.failing(lambda: sync.push(state))
            state.pop("stranger", None)
            if self.rank == 1:
                state.pop(next(iter(state)))
            missing = self.failing(lambda: sync.push(iter(state.items())))
            versions = [sync.push(self.mine(1, 0)).version]
            return {"stranger": stranger, "missing": missing, "versions": versions, "held": self.held(sync)}

    def broken(self) -> object:
        """A rank that cannot encode, one that cannot upload, and a first rank that cannot commit."""
        found: dict[str, object] = {}
        with self.sync("broken") as sync:
            sync.warm()
            for rank, what in ((1, "attempt.encode_shard"), (2, "attempt.upload_file"), (0, "attempt.put_if_absent")):
                import weighbridge.storage.attempt as module

                name = what.partition(".")[2]
                real = getattr(module, name)
                if self.rank == rank:
                    setattr(module, name, _out_of_memory)
                found[name] = self.failing(lambda: sync.push(iter(tensors(1).items())))
                setattr(module, name, real)
            return {**found, "versions": [sync.push(tensors(1)).version], "held": self.held(sync)}

    def hung(self) -> object:
        """A source that fails on one rank while the others wait for it in a collective. The last scenario: the process
        group is gone after it."""

        def export() -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, tensor) in enumerate(tensors(1).items()):
                if number == 5 and self.rank == 2:
                    raise ZeroDivisionError("the trainer's own")
                distributed.broadcast(tensor, 0)
                yield name, tensor

        sync = self.sync("hung", rank_grace=1.0)
        return {"hung": self.failing(lambda: sync.push(export()))}


def _out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError("no room")


SCENARIOS = (
    "fsdp", "meshes", "split", "moved", "stages", "everywhere", "replicas", "unfit", "broken", "hung",
)  # fmt: skip


def main(folder: Path, scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=LATEST_SECONDS))
    trainer = Trainer(folder)
    for scenario in scenarios or SCENARIOS:
        started = time.monotonic()
        found = getattr(trainer, scenario)()
        said = {"took": time.monotonic() - started, **found}
        (folder / f"{scenario}-{trainer.rank}.json").write_text(json.dumps(said))
    # The first rank may host the group's store, which others still ask what failed.
    deadline = time.monotonic() + LATEST_SECONDS
    while len(list(folder.glob(f"{scenario}-*.json"))) < trainer.size and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

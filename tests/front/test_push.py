"""`WeightSync.push` as a trainer lives with it: its threads, its memory, its signals, and servers that go away."""

import asyncio
import gc
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.checkpoints import state_digest_of, tiny_weights, trained, write_checkpoint

from weighbridge import PushResult, WeightSync
from weighbridge.errors import ForeignRun, GatherError, OrchestrationError, UsageError
from weighbridge.flows.lanes import Lanes
from weighbridge.flows.server import ServerInfo
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.stores import open_store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", tiny_weights())


@pytest.fixture
def sync(tmp_path: Path, base: Path, server: ServerInfo, home: Path) -> Iterator[WeightSync]:
    with WeightSync(tmp_path / "store", base, home=home) as opened:
        yield opened


def listing(store: Path) -> list[str]:
    return sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())


def test_a_push_publishes_exactly_these_weights_and_says_what_it_did(sync: WeightSync, tmp_path: Path) -> None:
    weights = trained(tiny_weights(), 1)
    result = sync.push(weights, labels={"step": 1})
    manifest = Lineage(open_store(str(tmp_path / "store"))).manifest(1)
    assert manifest.state_digest == state_digest_of(weights)
    assert manifest.labels["step"] == 1
    assert isinstance(result, PushResult)
    assert (result.version, result.outcome, result.hosts) == (1, "published", ())
    assert result.wire_bytes == manifest.wire_bytes > 0
    assert result.changed_elements == manifest.changed_elements
    assert 0 < result.density < 1
    assert {"gather", "commit", "total"} <= set(result.seconds)


def test_a_push_that_does_not_wait_returns_once_the_weights_were_read(sync: WeightSync, tmp_path: Path) -> None:
    first, second = trained(tiny_weights(), 1), trained(tiny_weights(), 2)
    pending = sync.push({name: array.copy() for name, array in first.items()}, wait=False)
    assert pending.version == 1
    assert sync.push(second).version == 2
    assert pending.result(timeout=30).version == 1
    assert pending.done()
    lineage = Lineage(open_store(str(tmp_path / "store")))
    assert lineage.manifest(1).state_digest == state_digest_of(first)
    assert lineage.manifest(2).state_digest == state_digest_of(second)


def test_weights_that_change_after_a_push_returned_do_not_reach_its_version(sync: WeightSync, tmp_path: Path) -> None:
    weights = trained(tiny_weights(), 1)
    wanted = state_digest_of(weights)
    pending = sync.push(weights, wait=False)
    for array in weights.values():
        array.reshape(-1).view(np.uint8)[:] = 0
    pending.result(timeout=30)
    assert Lineage(open_store(str(tmp_path / "store"))).manifest(1).state_digest == wanted


def test_an_unchanged_push_is_an_empty_version(sync: WeightSync) -> None:
    result = sync.push(tiny_weights())
    assert (result.version, result.changed_elements, result.wire_bytes) == (1, 0, 0)


def test_gathering_stays_in_the_callers_thread(sync: WeightSync) -> None:
    threads = set()

    def pairs() -> Iterator[tuple[str, Any]]:
        for name, array in tiny_weights().items():
            threads.add(threading.current_thread())
            yield name, array

    sync.push(pairs())
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("as_generator", [True, False])
def test_a_push_that_does_not_match_names_everything_and_leaves_the_store_untouched(
    sync: WeightSync, tmp_path: Path, as_generator: bool
) -> None:
    sync.push(trained(tiny_weights(), 1))
    before = listing(tmp_path / "store")
    weights = trained(tiny_weights(), 2)
    weights["layers.0.norm.weight"] = weights["layers.0.norm.weight"][:5]
    weights["stranger"] = weights.pop("mask")
    with pytest.raises(GatherError) as caught:
        sync.push(iter(weights.items()) if as_generator else weights)
    for name in ("layers.0.norm.weight", "stranger", "mask"):
        assert name in str(caught.value)
    assert listing(tmp_path / "store") == before
    assert sync.push(trained(tiny_weights(), 3)).version == 2


def test_an_error_of_the_trainers_own_generator_comes_back_as_it_is(sync: WeightSync, tmp_path: Path) -> None:
    def pairs() -> Iterator[tuple[str, Any]]:
        yield next(iter(trained(tiny_weights(), 1).items()))
        raise ZeroDivisionError("the trainer's own")

    sync.warm()
    before = listing(tmp_path / "store")
    with pytest.raises(ZeroDivisionError, match="the trainer's own"):
        sync.push(pairs())
    assert listing(tmp_path / "store") == before
    assert sync.push(trained(tiny_weights(), 1)).version == 1


def test_memory_that_runs_out_while_encoding_ends_the_push_and_leaves_the_store_untouched(
    sync: WeightSync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync.warm()
    before = listing(tmp_path / "store")

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room for a shard")

    with monkeypatch.context() as patched:
        patched.setattr("weighbridge.storage.attempt.encode_shard", fail)
        with pytest.raises(MemoryError, match="no room for a shard"):
            sync.push(trained(tiny_weights(), 1))
        with pytest.raises(MemoryError):
            sync.push(iter(trained(tiny_weights(), 1).items()))
    assert listing(tmp_path / "store") == before
    assert sync.push(trained(tiny_weights(), 1)).version == 1


def test_another_process_goes_on_with_the_run_and_a_run_of_another_name_is_refused(
    sync: WeightSync, tmp_path: Path, base: Path, home: Path
) -> None:
    sync.push(trained(tiny_weights(), 1))
    with WeightSync(tmp_path / "store", base, home=home) as second:
        assert second.version == 1
        assert second.push(trained(tiny_weights(), 2)).version == 2
    with pytest.raises(ForeignRun), WeightSync(tmp_path / "store", base, home=home, run="another") as third:
        third.warm()


def test_settings_that_cannot_be_right_are_refused_before_anything_starts(base: Path, tmp_path: Path) -> None:
    for wrong in ({"nonsense": 1}, {"policy": 1.5}, {"hosts": ["a", "a"]}, {"base": None}):
        with pytest.raises(UsageError):
            WeightSync(**{"store": tmp_path / "never", "base": base, **wrong})
    assert not (tmp_path / "never").exists()


def test_a_trainer_with_a_running_event_loop_can_push(sync: WeightSync) -> None:
    async def trainer() -> int:
        return sync.push(trained(tiny_weights(), 1)).version

    assert asyncio.run(trainer()) == 1


def test_signal_handlers_stay_the_trainers_own_during_and_after_a_push(sync: WeightSync) -> None:
    mine: Callable[..., None] = lambda *_: None  # noqa: E731
    before = {number: signal.signal(number, mine) for number in (signal.SIGTERM, signal.SIGINT)}
    seen = []

    def pairs() -> Iterator[tuple[str, Any]]:
        for pair in trained(tiny_weights(), 1).items():
            seen.append(signal.getsignal(signal.SIGTERM))
            yield pair

    try:
        sync.push(pairs())
        assert set(seen) == {mine}
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refuse(*_: object) -> int:
    raise ZeroDivisionError("no upload today")


def script(text: str, tmp_path: Path, home: Path, *command: str, **popen: Any) -> "subprocess.Popen[str]":
    path = tmp_path / "trainer.py"
    path.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "WEIGHBRIDGE_HOME": str(home)}
    return subprocess.Popen(
        [sys.executable, *command, str(path)], env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path, **popen
    )


def test_a_trainer_killed_by_sigterm_in_mid_push_leaves_a_whole_version_or_none(
    tmp_path: Path, base: Path, server: ServerInfo, home: Path
) -> None:
    trainer = script(
        """
        import signal, sys, threading
        from tests.checkpoints import tiny_weights, trained
        from weighbridge import WeightSync

        sync = WeightSync("store", "base")
        sync.push(trained(tiny_weights(), 1))

        def pairs():
            for number, pair in enumerate(trained(tiny_weights(), 2).items()):
                if number == 3:
                    print("half", flush=True)
                    threading.Event().wait(60)
                yield pair

        sync.push(pairs())
        """,
        tmp_path,
        home,
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "half\n"
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(20) == -signal.SIGTERM
    with WeightSync(tmp_path / "store", base, home=home) as again:
        assert again.version == 1
        assert again.push(trained(tiny_weights(), 3)).version == 2
    assert Lineage(open_store(str(tmp_path / "store"))).manifest(2).state_digest == state_digest_of(
        trained(tiny_weights(), 3)
    )


def test_a_push_works_under_torchrun(tmp_path: Path, base: Path, server: ServerInfo, home: Path) -> None:
    trainer = script(
        """
        from tests.checkpoints import tiny_weights, trained
        from weighbridge import WeightSync

        with WeightSync("store", "base") as sync:
            print("pushed", sync.push(trained(tiny_weights(), 1)).version, flush=True)
        """,
        tmp_path,
        home,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
    )
    said, _ = trainer.communicate(timeout=120)
    assert trainer.returncode == 0
    assert "pushed 1" in said


def test_a_dataloader_may_fork_while_a_push_is_in_flight(sync: WeightSync) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=8, num_workers=2, multiprocessing_context="fork")
    sums = []

    def pairs() -> Iterator[tuple[str, Any]]:
        for pair in trained(tiny_weights(), 1).items():
            sums.append(sum(int(batch.sum()) for (batch,) in loader))
            yield pair

    assert sync.push(pairs()).version == 1
    assert set(sums) == {sum(range(64))}
    pending = sync.push(trained(tiny_weights(), 2), wait=False)
    assert sum(int(batch.sum()) for (batch,) in loader) == sum(range(64))
    assert pending.result(timeout=30).version == 2


def test_a_lane_that_cannot_connect_answers_whoever_waits(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path / "a home")  # its blank is more than PostgreSQL's tools can take
    for _ in range(2):
        with pytest.raises(UsageError, match="blanks"):
            lanes.submit(lambda: None).result(timeout=30)
    lanes.close()


def test_a_failure_that_nobody_asked_for_is_raised_at_the_end(
    tmp_path: Path, base: Path, home: Path, server: ServerInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weighbridge.storage.attempt.Attempt.upload", _refuse)
    with pytest.raises(ZeroDivisionError), WeightSync(tmp_path / "store", base, home=home) as sync:
        sync.push(trained(tiny_weights(), 1), wait=False)


def test_a_server_that_does_not_answer_means_nothing_was_published(
    tmp_path: Path, base: Path, home: Path, server: ServerInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightSync(tmp_path / "store", base, home=home) as sync:
        _ = sync.version
        before = listing(tmp_path / "store")
        monkeypatch.setattr("weighbridge.flows.lanes.find_api", lambda _home: "http://127.0.0.1:9/api")
        with pytest.raises(OrchestrationError):
            sync.push(trained(tiny_weights(), 1))
        assert listing(tmp_path / "store") == before
        monkeypatch.undo()
        assert sync.push(trained(tiny_weights(), 1)).version == 1


@pytest.mark.parametrize("pushes", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_many_pushes_in_one_process_stay_flat(sync: WeightSync, pushes: int) -> None:
    process, seconds, resident = psutil.Process(), [], []
    weights = tiny_weights()
    for step in range(pushes):
        weights = trained(weights, step, share=0.01)
        started = time.perf_counter()
        assert sync.push(weights).version == step + 1
        seconds.append(time.perf_counter() - started)
        if step % 10 == 9:
            gc.collect()
            resident.append(process.memory_info().rss)
    # Other tests run beside this one, so a factor; a leak that grows with every push shows as far more.
    assert statistics.median(seconds[-15:]) < 3 * statistics.median(seconds[5:20])
    assert resident[-1] - resident[1] < 32 << 20


def test_a_gigabyte_of_tensors_is_never_hashed_copied_or_serialised_by_the_orchestrator(
    tmp_path: Path, server: ServerInfo, home: Path
) -> None:
    import torch
    from prefect.utilities.hashing import hash_objects
    from safetensors.torch import save_file

    weights = {f"layers.{i}.weight": torch.zeros(64 << 20, dtype=torch.uint8) for i in range(16)}
    weights["layers.0.weight"][::4096] = 1
    (tmp_path / "big").mkdir()
    save_file(weights, tmp_path / "big" / "model.safetensors")
    with WeightSync(tmp_path / "store", tmp_path / "big", home=home, spool=tmp_path) as sync:
        sync.push(weights)  # opens, compiles, connects
        for tensor in weights.values():
            tensor[: 1 << 10] += 1
        peak = _Peak()
        cpu = time.process_time()
        with peak:
            assert sync.push(weights).changed_elements == 16 << 10
        cpu = time.process_time() - cpu
    started = time.process_time()
    assert hash_objects(weights["layers.0.weight"].numpy().tobytes()) is not None
    hashed = 16 * (time.process_time() - started)
    # Prefect's own hash of a gigabyte takes seconds and two copies; a push must cost clearly less than that alone.
    assert cpu < hashed
    assert peak.extra_bytes < 512 << 20


class _Peak:
    """The most resident memory above that at the start, sampled in a thread."""

    def __enter__(self) -> "_Peak":
        self._process = psutil.Process()
        self._start = self._most = self._process.memory_info().rss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self._most = max(self._most, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        return self._most - self._start

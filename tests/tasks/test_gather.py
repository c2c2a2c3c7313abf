"""Whatever a trainer pushes becomes exactly the base's tensors, or one error that names all that is wrong."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save, save_file
from torch import nn

from weighbridge.errors import CheckpointError, GatherError, UsageError
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.expectation import Expectation
from weighbridge.tasks.gather import Gathered, gather
from weighbridge.tasks.host_bytes import through_pieces
from weighbridge.values import TensorSpec

Tensors = Mapping[str, torch.Tensor]

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def spec_of(name: str, tensor: torch.Tensor, dtype: str | None = None) -> TensorSpec:
    chosen = dtype or NAMES[tensor.dtype]
    return TensorSpec(name, chosen, tuple(tensor.shape), tensor.numel() * DTYPES[chosen].itemsize)


def expecting(tensors: Tensors, **more: Any) -> Expectation:
    return Expectation({name: spec_of(name, tensor) for name, tensor in tensors.items()}, **more)


def true_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes by the safetensors library, not by the code under test."""
    raw = save({"t": tensor.detach().clone(memory_format=torch.contiguous_format)})
    return raw[8 + int.from_bytes(raw[:8], "little") :]


def pairs(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()


def folder(tmp_path: Path) -> Callable[[Tensors], Path]:
    def write(tensors: Tensors) -> Path:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return write


KINDS = ["mapping", "list", "items", "pairs", "folder"]


def as_source(kind: str, tensors: Tensors, tmp_path: Path) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "mapping": lambda: dict(tensors),
        "list": lambda: list(tensors.items()),
        "items": lambda: dict(tensors).items(),
        "pairs": lambda: pairs(tensors),
        "folder": lambda: folder(tmp_path)(tensors),
    }
    return made[kind]()


def collect(source: Any, expect: Expectation) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for item in gather(source, expect):
        assert item.name not in found
        assert item.spec == expect.specs[item.name]
        assert item.data.dtype == np.uint8
        assert item.data.ndim == 1
        assert item.data.flags.c_contiguous
        assert not item.data.flags.writeable
        assert item.data.size == item.spec.nbytes
        found[item.name] = item.data.tobytes()
    return found


def refused(source: Any, expect: Expectation) -> str:
    with pytest.raises(GatherError) as caught:
        list(gather(source, expect))
    return str(caught.value)


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "embed.weight": torch.randn(6, 4).to(torch.bfloat16),
        "layers.0.w": torch.randn(4, 4),
        "layers.0.scale": torch.tensor(0.5),
        "layers.0.none": torch.empty(0, 3),
        "layers.0.ids": torch.arange(5),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_brings_every_tensor_once_with_its_bytes(kind: str, tmp_path: Path) -> None:
    tensors = model()
    found = collect(as_source(kind, tensors, tmp_path), expecting(tensors))
    assert found == {name: true_bytes(tensor) for name, tensor in tensors.items()}


def test_a_module_brings_parameters_and_buffers_without_their_gradients() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module(torch.randn(5, 3)).sum().backward()
    state = module.state_dict()
    assert "1.running_mean" in state
    found = collect(module, expecting(state))
    assert found == {name: true_bytes(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (), (0,), (2, 0, 3), (1,)])
def test_every_dtype_and_shape_is_exact(dtype: str, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    raw = torch.frombuffer(bytearray(np.random.default_rng(1).bytes(max(size, 1))), dtype=torch.uint8)[:size].clone()
    if dtype == "BOOL":
        raw &= 1
    tensor = raw.view(DTYPES[dtype]).reshape(shape)
    for source in ({"t": tensor}, iter([("t", tensor)])):
        assert collect(source, expecting({"t": tensor})) == {"t": raw.numpy().tobytes()}


def test_packed_fp4_has_the_shape_that_safetensors_gives_it() -> None:
    raw = torch.arange(12, dtype=torch.uint8)
    tensor = raw.view(torch.float4_e2m1fn_x2).reshape(3, 4)
    assert b'"shape":[3,8]' in save({"t": tensor})
    expect = Expectation({"t": TensorSpec("t", "F4", (3, 8), 12)})
    assert collect({"t": tensor}, expect) == {"t": bytes(range(12))}


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[:1].expand(7, 6),
    "every second row": lambda t: t[::2],
    "a column": lambda t: t[:, 2],
    "later rows": lambda t: t[3:],
    "requires grad": lambda t: t.clone().requires_grad_(),
    "result of an operation": lambda t: t.clone().requires_grad_() * 2,
    "parameter": lambda t: nn.Parameter(t.t()),
    "channels last": lambda t: t.reshape(1, 2, 4, 6).to(memory_format=torch.channels_last),
    "conjugate": lambda t: torch.complex(t, t).conj(),
    "negative": lambda t: torch.complex(t, t).conj().imag,
    "negative in row order": torch._neg_view,
    "scalar of a slice": lambda t: t[2, 3],
    "empty slice": lambda t: t[:, :0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_as_their_values_in_row_order(view: str) -> None:
    tensor = VIEWS[view](torch.arange(48, dtype=torch.float32).reshape(8, 6))
    for source in ({"t": tensor}, iter([("t", tensor)])):
        assert collect(source, expecting({"t": tensor})) == {"t": true_bytes(tensor.resolve_conj().resolve_neg())}


@pytest.mark.parametrize("have", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("want", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("kind", ["mapping", "pairs", "folder"])
def test_the_three_runtime_dtypes_become_the_bases_as_torch_rounds(
    have: str, want: str, kind: str, tmp_path: Path
) -> None:
    odd = [0.0, -0.0, 1.0 + 2**-9, 1.0 + 3 * 2**-9, 1.0 + 2**-12, 65519.0, 65520.0, 1e38, 1e-40, -1e-8]
    odd += [float("inf"), float("-inf"), float("nan")]
    tensor = torch.tensor(odd).to(DTYPES[have])
    expect = Expectation({"t": spec_of("t", tensor, want)})
    found = collect(as_source(kind, {"t": tensor}, tmp_path), expect)
    assert found == {"t": true_bytes(tensor.to(DTYPES[want]))}


def test_rounding_is_to_nearest_even() -> None:
    tensor = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8])  # both halfway between two bf16 values
    found = collect({"t": tensor}, Expectation({"t": spec_of("t", tensor, "BF16")}))
    assert np.frombuffer(found["t"], np.uint16).tolist() == [0x3F80, 0x3F82]


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ("F64", "F32"),
        ("F32", "F64"),
        ("BF16", "F8_E4M3"),
        ("I32", "I64"),
        ("U8", "BOOL"),
        ("U16", "BF16"),
        ("U8", "I8"),
    ],
)
@pytest.mark.parametrize("kind", ["mapping", "pairs", "folder"])
def test_other_dtypes_are_refused_when_they_differ(have: str, want: str, kind: str, tmp_path: Path) -> None:
    tensor = torch.zeros(4, dtype=DTYPES[have])
    said = refused(as_source(kind, {"t": tensor}, tmp_path), Expectation({"t": spec_of("t", tensor, want)}))
    assert f"t: dtype {have}, but the base has {want}" in said


@pytest.mark.parametrize("kind", KINDS)
def test_one_error_names_every_missing_extra_misshapen_and_mistyped_tensor(kind: str, tmp_path: Path) -> None:
    base = {name: torch.zeros(3, 4) for name in ("good", "gone.a", "gone.b", "bent.a", "bent.b", "typed.a", "typed.b")}
    sent = {
        "good": torch.zeros(3, 4),
        "bent.a": torch.zeros(4, 3),
        "bent.b": torch.zeros(12),
        "typed.a": torch.zeros(3, 4, dtype=torch.float64),
        "typed.b": torch.zeros(3, 4, dtype=torch.int32),
        "new.a": torch.zeros(1),
        "new.b": torch.zeros(2),
    }
    said = refused(as_source(kind, sent, tmp_path), expecting(base))
    for line in (
        "missing (2):",
        "- gone.a",
        "- gone.b",
        "not in the base (2):",
        "- new.a",
        "- new.b",
        "bent.a: shape 4x3, but the base has 3x4",
        "bent.b: shape 12, but the base has 3x4",
        "typed.a: dtype F64, but the base has F32",
        "typed.b: dtype I32, but the base has F32",
        "Nothing was published",
    ):
        assert line in said
    assert "good" not in said


@pytest.mark.parametrize("kind", ["mapping", "list", "items", "folder"])
def test_what_can_be_checked_ahead_yields_nothing_when_the_last_tensor_is_wrong(kind: str, tmp_path: Path) -> None:
    tensors = model()
    stream = gather(as_source(kind, {**tensors, "zzz": torch.zeros(1)}, tmp_path), expecting(tensors))
    with pytest.raises(GatherError, match="zzz"):
        next(stream)


def test_a_generator_is_run_to_its_end_after_a_fault_and_yields_nothing_more() -> None:
    tensors = model()
    ran: list[str] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in [("stray", torch.zeros(1)), *tensors.items(), ("late", torch.zeros(1))]:
            ran.append(name)
            yield name, tensor

    came: list[Gathered] = []
    with pytest.raises(GatherError) as caught:
        came.extend(gather(source(), expecting(tensors)))
    assert came == []
    assert ran == ["stray", *tensors, "late"]
    assert "- stray" in str(caught.value)
    assert "- late" in str(caught.value)


@pytest.mark.parametrize("as_list", [True, False])
def test_a_name_that_comes_twice_is_refused_even_with_equal_bytes(as_list: bool) -> None:
    tensors = model()
    twice = [*tensors.items(), ("layers.0.w", tensors["layers.0.w"])]
    said = refused(twice if as_list else iter(twice), expecting(tensors))
    assert "came more than once (1):\n  - layers.0.w" in said


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about quantized tensors and about fake ones
def test_tensors_without_bytes_of_their_own_are_refused_by_name() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2)
    unreadable = {
        "meta": torch.empty(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)]),
        "sparse": torch.zeros(2).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
        "fake": fake,
        "text": "weights",
        "nothing": None,
        "objects": np.array([{}, {}]),
        "complex128": torch.zeros(2, dtype=torch.complex128),
    }
    expect = Expectation({name: TensorSpec(name, "F32", (2,), 8) for name in unreadable})
    for source in (unreadable, iter(unreadable.items())):
        said = refused(source, expect)
        for name in unreadable:
            assert f"- {name}: " in said
        assert "missing" not in said


def test_numpy_arrays_are_taken_like_tensors() -> None:
    arrays = {
        "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
        "transposed": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "scalar": np.array(7, np.int64),
        "empty": np.empty((0, 2), np.float16),
        "big endian": np.arange(4, dtype=">f4"),
        "flags": np.array([True, False]),
        "read only": np.frombuffer(b"12345678", np.uint8),
        "every second": np.arange(8, dtype=np.uint32)[::2],
    }
    specs = {
        name: TensorSpec(name, dtype, arrays[name].shape, arrays[name].nbytes)
        for name, dtype in zip(arrays, ["F32", "I16", "I64", "F16", "F32", "BOOL", "U8", "U32"], strict=True)
    }
    expected = {name: array.astype(array.dtype.newbyteorder("<")).tobytes() for name, array in arrays.items()}
    assert collect(arrays, Expectation(specs)) == expected
    assert collect(iter(arrays.items()), Expectation(specs)) == expected


def test_numpy_arrays_are_converted_as_tensors_are() -> None:
    values = np.array([1.0 + 2**-8, 1.0 + 3 * 2**-8, 1e38], np.float32)
    for array in (values, np.frombuffer(values.tobytes(), np.float32), values.astype(">f4")):
        found = collect({"t": array}, Expectation({"t": TensorSpec("t", "BF16", (3,), 6)}))
        assert found == {"t": true_bytes(torch.from_numpy(values).to(torch.bfloat16))}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.lm_head = nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embed.weight


TIE = {"lm_head.weight": "embed.weight"}


def tied_base() -> tuple[Tied, dict[str, torch.Tensor]]:
    module = Tied()
    state = module.state_dict()
    return module, {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


def test_a_tied_module_is_stored_once_with_an_alias() -> None:
    module, base = tied_base()
    expect = expecting(base, aliases=TIE)
    expected = {name: true_bytes(tensor) for name, tensor in base.items()}
    assert collect(module, expect) == expected
    assert collect(module.state_dict(), expect) == expected
    assert collect(pairs(module.state_dict()), expect) == expected
    assert collect(module.named_parameters(), expect) == expected  # names a tied tensor only once


@pytest.mark.parametrize("as_mapping", [True, False])
def test_a_tied_pair_without_an_alias_is_refused_and_the_error_says_which_alias_to_pass(as_mapping: bool) -> None:
    module, base = tied_base()
    state = module.state_dict()
    said = refused(state if as_mapping else pairs(state), expecting(base))
    assert "not in the base (1):\n  - lm_head.weight" in said
    assert "pass aliases={'lm_head.weight': 'embed.weight'}" in said


def test_memory_that_was_freed_and_used_again_does_not_look_tied() -> None:
    base = {"a": torch.zeros(1 << 16)}
    sent = ((name, torch.zeros(1 << 16)) for name in ("a", "b", "c", "d"))
    assert "pass aliases" not in refused(sent, expecting(base))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False])
def test_a_copy_of_a_tied_tensor_must_equal_it_to_the_bit(kind: str, first: bool, tmp_path: Path) -> None:
    stored = torch.tensor([0.0, float("nan"), 1.0])
    expect = expecting({"embed.weight": stored}, aliases=TIE)

    def sent(copy: torch.Tensor) -> Tensors:
        both = {"lm_head.weight": copy, "embed.weight": stored}
        return both if first else dict(reversed(both.items()))

    source = as_source(kind, sent(stored.clone()), tmp_path)
    assert collect(source, expect) == {"embed.weight": true_bytes(stored)}
    said = refused(as_source(kind, sent(torch.tensor([-0.0, float("nan"), 1.0])), tmp_path), expect)
    assert "not equal to what they are tied to (1):\n  - lm_head.weight: its bytes differ from those of embed" in said


def test_tied_tensors_are_compared_as_the_bases_dtype_holds_them() -> None:
    stored = torch.tensor([1.0, 2.0])
    expect = Expectation({"embed.weight": spec_of("embed.weight", stored, "BF16")}, aliases=TIE)
    sent = {"embed.weight": stored, "lm_head.weight": stored.to(torch.bfloat16)}
    assert list(collect(sent, expect)) == ["embed.weight"]
    assert list(collect(pairs(sent), expect)) == ["embed.weight"]


@pytest.mark.parametrize("as_mapping", [True, False])
def test_a_tied_tensor_cannot_stand_for_one_that_did_not_come(as_mapping: bool) -> None:
    stored = torch.ones(2)
    sent = {"lm_head.weight": stored}
    said = refused(sent if as_mapping else pairs(sent), expecting({"embed.weight": stored}, aliases=TIE))
    assert "missing (1):\n  - embed.weight" in said
    expect = expecting({"embed.weight": stored}, aliases=TIE, unchanged=("embed.*",))
    assert "embed.weight did not come" in refused(sent if as_mapping else pairs(sent), expect)


def test_a_misshapen_tied_tensor_is_refused() -> None:
    said = refused(
        {"embed.weight": torch.ones(2), "lm_head.weight": torch.ones(3)},
        expecting({"embed.weight": torch.ones(2)}, aliases=TIE),
    )
    assert "lm_head.weight: shape 3, but the base has 2" in said


def test_two_names_may_be_tied_to_one() -> None:
    for stored in (torch.ones(2), torch.empty(0, 2)):
        check_tied_to_one(stored)


def check_tied_to_one(stored: torch.Tensor) -> None:
    sent = {"a": stored, "b": stored.clone(), "c": stored}
    expect = expecting({"a": stored}, aliases={"b": "a", "c": "a"})
    assert list(collect(sent, expect)) == ["a"]
    assert list(collect(pairs(sent), expect)) == ["a"]


def test_aliases_that_cannot_be_right_are_refused_at_once() -> None:
    specs = {"a": TensorSpec("a", "F32", (), 4)}
    with pytest.raises(UsageError, match="'b' is tied to 'x', which the base does not have"):
        Expectation(specs, aliases={"b": "x"})
    with pytest.raises(UsageError, match="'a' is a stored tensor itself"):
        Expectation(specs, aliases={"a": "a"})


@pytest.mark.parametrize("kind", KINDS)
def test_unchanged_patterns_excuse_what_does_not_come_and_nothing_else(kind: str, tmp_path: Path) -> None:
    base = {name: torch.ones(1) for name in ("vision.a", "vision.b", "text.a", "text.b")}
    expect = expecting(base, unchanged=("vision.*",))
    text = {name: tensor for name, tensor in base.items() if name.startswith("text")}
    assert set(collect(as_source(kind, text, tmp_path), expect)) == set(text)
    with_one = {**text, "vision.b": torch.zeros(1)}
    assert collect(as_source(kind, with_one, tmp_path), expect)["vision.b"] == bytes(4)
    said = refused(as_source(kind, {"text.a": torch.ones(1)}, tmp_path), expect)
    assert "missing (1):\n  - text.b" in said
    assert "vision" not in said


def test_a_wrapped_module_gets_a_hint() -> None:
    inner = nn.Linear(2, 2)
    wrapper = nn.Module()
    wrapper.module = inner
    assert "push the module that is wrapped" in refused(wrapper, expecting(inner.state_dict()))


def test_an_exception_of_the_generator_reaches_the_caller_as_it_is() -> None:
    tensors = model()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed.weight", tensors["embed.weight"]
        raise MemoryError("out of memory while exporting")

    stream = gather(source(), expecting(tensors))
    assert next(stream).name == "embed.weight"
    with pytest.raises(MemoryError, match="while exporting"):
        next(stream)


def test_what_cannot_be_pushed_at_all_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="int cannot be pushed"):
        gather(3, expecting({}))  # type: ignore[arg-type]
    with pytest.raises(GatherError, match=r"takes \(name, tensor\) pairs, and Tensor came"):
        list(gather([torch.ones(2)], expecting({})))  # type: ignore[list-item]
    with pytest.raises(CheckpointError, match="not a folder"):
        gather("no/such/folder", expecting({}))


def test_a_contiguous_tensor_of_the_right_dtype_is_not_copied_and_anything_else_is() -> None:
    plain, bent = torch.ones(4, 2), torch.ones(2, 4).t()
    items = {
        item.name: item for item in gather({"plain": plain, "bent": bent}, expecting({"plain": plain, "bent": bent}))
    }
    assert items["plain"].data.ctypes.data == plain.data_ptr()
    assert items["plain"].lasting() is items["plain"].data
    assert items["bent"].data.ctypes.data != bent.data_ptr()
    assert items["plain"].stable
    assert items["bent"].stable


def test_a_generator_that_fills_one_buffer_again_is_safe_with_lasting() -> None:
    buffer = torch.empty(3)
    expect = Expectation({str(i): TensorSpec(str(i), "F32", (3,), 12) for i in range(4)})

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(4):
            yield str(i), buffer.fill_(i)

    kept = [(item.stable, item.lasting()) for item in gather(source(), expect)]
    assert [stable for stable, _ in kept] == [False] * 4
    assert [data.view(np.float32).tolist() for _, data in kept] == [[float(i)] * 3 for i in range(4)]


def test_a_generators_tensor_is_let_go_before_the_next_one_is_asked_for() -> None:
    expect = Expectation({str(i): TensorSpec(str(i), "BF16", (3,), 6) for i in range(4)})
    last: list[weakref.ref[torch.Tensor]] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(4):
            gc.collect()
            assert all(ref() is None for ref in last)
            tensor = torch.full((3,), float(i))
            last.append(weakref.ref(tensor))
            yield str(i), tensor
            del tensor

    for item in gather(source(), expect):
        del item
    assert len(last) == 4


def test_gathering_stays_in_the_callers_thread_and_leaves_grad_mode_alone() -> None:
    tensors = model()
    seen: list[tuple[int, bool]] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            seen.append((threading.get_ident(), torch.is_grad_enabled()))
            yield name, tensor

    for _ in gather(source(), expecting(tensors)):
        assert torch.is_grad_enabled()
    assert set(seen) == {(threading.get_ident(), True)}


def test_a_mapping_that_loads_on_demand_is_never_held_whole() -> None:
    alive = [0, 0]

    class Lazy(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            tensor = torch.full((2,), float(name))
            alive[0] += 1
            alive[1] = max(alive)
            weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - 1))
            return tensor

        def __iter__(self) -> Iterator[str]:
            return iter(map(str, range(6)))

        def __len__(self) -> int:
            return 6

    expect = Expectation({str(i): TensorSpec(str(i), "BF16", (2,), 4) for i in range(6)})
    assert len(collect(Lazy(), expect)) == 6
    assert alive[1] <= 2


def test_a_tensor_that_changes_its_size_between_check_and_use_is_refused() -> None:
    class Growing(dict[str, torch.Tensor]):
        sizes = iter([2, 3])

        def __iter__(self) -> Iterator[str]:
            return iter(["t"])

        def __getitem__(self, name: str) -> torch.Tensor:
            return torch.ones(next(self.sizes))

    with pytest.raises(GatherError, match="t: 12 bytes came where 8 were announced"):
        list(gather(Growing(), expecting({"t": torch.ones(2)})))


def test_a_folder_that_is_cut_short_during_the_push_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    tensors = model()
    stream = gather(folder(tmp_path)(tensors), expecting(tensors))
    next(stream)
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match="became shorter"):
        list(stream)


def test_a_folder_with_an_unknown_dtype_is_taken_as_it_is(tmp_path: Path) -> None:
    text = b'{"q":{"dtype":"INT3","shape":[8],"data_offsets":[0,3]}}'
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"abc")
    specs = open_checkpoint(tmp_path).specs()
    assert collect(tmp_path, Expectation(specs)) == {"q": b"abc"}
    assert "q: dtype U8, but the base has INT3" in refused({"q": torch.zeros(8, dtype=torch.uint8)}, Expectation(specs))


def test_a_folder_of_the_bases_dtypes_is_gathered_without_torch(tmp_path: Path) -> None:
    folder(tmp_path)(model())
    code = (
        "import sys; from weighbridge.tasks.gather import gather\n"
        "from weighbridge.storage.checkpoint import open_checkpoint\n"
        "from weighbridge.storage.expectation import Expectation\n"
        f"specs = open_checkpoint(__import__('pathlib').Path({str(tmp_path)!r})).specs()\n"
        f"assert len(list(gather({str(tmp_path)!r}, Expectation(specs)))) == 5\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_distributed_tensor_is_put_together_in_the_callers_thread() -> None:
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        plain = torch.arange(8, dtype=torch.float32).reshape(4, 2)
        spread = DTensor.from_local(plain, init_device_mesh("cpu", (1,)), [Shard(0)])
        for source in ({"t": nn.Parameter(spread)}, iter([("t", spread)])):
            assert collect(source, expecting({"t": plain})) == {"t": true_bytes(plain)}
    finally:
        distributed.destroy_process_group()


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 40), piece=st.integers(1, 9))
def test_pieces_are_read_only_after_a_late_copy_has_ended_and_used_again_only_after_that(size: int, piece: int) -> None:
    source = torch.arange(size, dtype=torch.uint8) + 1
    busy: set[int] = set()

    def start(target: torch.Tensor, data: torch.Tensor) -> Callable[[], object]:
        assert target.data_ptr() not in busy
        busy.add(target.data_ptr())
        target.fill_(0)  # what a read before the wait would see

        def wait() -> None:
            target.copy_(data)
            busy.remove(target.data_ptr())

        return wait

    pieces = (torch.empty(piece, dtype=torch.uint8), torch.empty(piece, dtype=torch.uint8))
    assert through_pieces(source, pieces, start).tobytes() == source.numpy().tobytes()
    assert not busy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_tensors_are_copied_after_what_their_stream_still_computes() -> None:
    torch.manual_seed(5)
    state = {f"w{i}": torch.randn(2048, 2048, device="cuda") for i in range(4)}
    for _ in range(20):
        for tensor in state.values():
            tensor.add_(0.001)
    state["bent"] = state["w0"].t()
    state["scalar"] = torch.tensor(3.0, device="cuda")
    state["large"] = torch.randint(0, 255, (200 << 20,), dtype=torch.uint8, device="cuda")
    expect = Expectation({name: spec_of(name, t, None if name == "large" else "BF16") for name, t in state.items()})
    found = {item.name: item.lasting() for item in gather(pairs(state), expect)}
    for name, tensor in state.items():
        host = tensor.cpu() if name == "large" else tensor.cpu().to(torch.bfloat16)
        assert found[name].tobytes() == true_bytes(host)


def test_the_reference_for_these_tests_is_right() -> None:
    tensor = torch.arange(6).reshape(2, 3).t()
    assert true_bytes(tensor) == tensor.contiguous().numpy().tobytes()
    assert torch.equal(load(save({"t": tensor.contiguous()}))["t"], tensor)

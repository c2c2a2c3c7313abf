"""The house's floors: imports go downwards only, the ground imports nothing of ours, and what is light stays light."""

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import weighbridge

PACKAGE = Path(weighbridge.__file__).parent
CODECS_MAY_IMPORT = (
    *sorted(sys.stdlib_module_names - {"os", "pathlib", "io", "socket", "subprocess", "shutil", "tempfile", "time"}),
    "llvmlite",
    "numba",
    "numpy",
    "safetensors",
    "xxhash",
    "zstandard",
    "weighbridge.errors",
    "weighbridge.values",
    "weighbridge.storage.codecs",
    "weighbridge.storage.digests",
    "weighbridge.storage.safetensors_header",
)


@dataclass(frozen=True)
class Import:
    """One name that a module imports: where, and whether it is executed when the module is."""

    module: str
    line: int
    name: str
    at_import: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"

    def of(self, *packages: str) -> bool:
        return any(self.name == package or self.name.startswith(f"{package}.") for package in packages)


def module_name(path: Path) -> str:
    parts = ("weighbridge", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files() -> Iterator[Path]:
    # The rooms are symbolic links, which a walk must be told to follow.
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


@cache
def modules() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text(), str(path)) for path in files()}


def imports_in(module: str, node: ast.AST, *, at_import: bool = True, for_types: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        now = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        types = for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, child.lineno, alias.name, now, types)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module}:{child.lineno} imports relatively"
            for alias in child.names:
                # `from package import module` and `from module import name` look alike; both names are tested.
                yield Import(module, child.lineno, f"{child.module}.{alias.name}", now, types)
        else:
            yield from imports_in(module, child, at_import=now, for_types=types)


@cache
def imports(room: str = "") -> tuple[Import, ...]:
    inside = f"weighbridge.{room}" if room else "weighbridge"
    return tuple(
        found
        for module, tree in modules().items()
        if module == inside or module.startswith(f"{inside}.")
        for found in imports_in(module, tree)
    )


def assert_none(found: list[Import]) -> None:
    assert not found, "\n".join(map(str, found))


def test_every_room_is_seen_by_these_tests() -> None:
    for room in ("flows", "tasks", "storage", "storage.codecs", "storage.stores", "storage.replica"):
        assert len(imports(room)) > 10, room
    assert "weighbridge.storage.publisher" in modules()


def test_a_forbidden_import_would_be_found() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    import torch\ndef f():\n    from prefect import flow\nfrom a import b")
    found = list(imports_in("m", tree))
    assert [(i.name, i.at_import, i.for_types) for i in found] == [
        ("torch", True, True),
        ("prefect.flow", False, False),
        ("a.b", True, False),
    ]
    assert found[1].of("prefect") and not found[1].of("pre", "prefect.flows")


def test_the_ground_imports_nothing_of_ours() -> None:
    assert_none([i for room in ("errors", "values", "visible") for i in imports(room) if i.of("weighbridge")])


def test_storage_imports_only_downwards() -> None:
    allowed = ("weighbridge.storage", "weighbridge.errors", "weighbridge.values")
    assert_none([i for i in imports("storage") if i.of("weighbridge") and not i.of(*allowed)])


def test_storage_knows_neither_prefect_nor_torch_distributed() -> None:
    assert_none([i for i in imports("storage") if i.of("prefect", "torch.distributed")])


def test_storage_does_not_import_torch_when_it_is_imported() -> None:
    assert_none([i for i in imports("storage") if i.of("torch") and i.at_import and not i.for_types])


def test_tasks_do_not_know_flows() -> None:
    allowed = ("weighbridge.tasks", "weighbridge.storage", "weighbridge.errors", "weighbridge.values")
    assert_none([i for i in imports("tasks") if i.of("weighbridge") and not i.of(*allowed)])


def test_flows_do_not_know_the_front_door() -> None:
    assert_none([i for i in imports("flows") if i.of("weighbridge.weight_sync", "weighbridge.cli", "weighbridge.demo")])


def test_codecs_are_pure() -> None:
    """Bytes in, bytes out: no files, no clock, nothing of ours but the ground and what names digests and headers."""
    assert_none([i for i in imports("storage.codecs") if not i.of(*CODECS_MAY_IMPORT)])


def test_only_flows_and_tasks_import_prefect() -> None:
    assert_none(
        [
            i
            for i in imports()
            if i.of("prefect") and not i.module.startswith(("weighbridge.flows", "weighbridge.tasks"))
        ]
    )


def loaded_by(*names: str) -> set[str]:
    """What is loaded in a fresh process that imports these."""
    code = f"import {', '.join(names)}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", ["weighbridge", "weighbridge.storage.codecs"])
def test_importing_it_in_a_fresh_process_loads_neither_prefect_nor_torch(name: str) -> None:
    loaded = loaded_by(name)
    assert name in loaded
    assert not loaded & {"prefect", "torch", "weighbridge.flows", "weighbridge.tasks"}


def test_importing_all_of_storage_in_a_fresh_process_loads_neither_prefect_nor_torch() -> None:
    loaded = loaded_by(*sorted(name for name in modules() if name.startswith("weighbridge.storage")))
    assert "weighbridge.storage.publisher" in loaded
    assert not loaded & {"prefect", "torch", "weighbridge.flows", "weighbridge.tasks"}


def test_the_front_door_shows_exactly_its_public_names() -> None:
    public = ["HostOutcome", "PendingPush", "PushResult", "WeightSync", "__version__", "errors", "open_run"]
    assert sorted(weighbridge.__all__) == public
    assert dir(weighbridge) == public


@pytest.mark.parametrize("name", weighbridge.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(weighbridge, name) is not None


def test_public_classes_are_those_of_their_homes() -> None:
    assert weighbridge.PushResult is importlib.import_module("weighbridge.values").PushResult
    assert weighbridge.errors is importlib.import_module("weighbridge.errors")


def test_any_other_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'WeightSink'"):
        _ = weighbridge.WeightSink


def test_every_error_derives_from_the_root_and_has_an_exit_code_as_drawn() -> None:
    errors = importlib.import_module("weighbridge.errors")
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.WeighbridgeError)]
    drawn = [line.strip("│├└─ ") for line in errors.__doc__.splitlines() if "──" in line or line.startswith("Weigh")]
    assert [line.split()[0] for line in drawn] == [c.__name__ for c in classes]
    assert all(str(c.exit_code) in line.split() for line, c in zip(drawn, classes, strict=True))

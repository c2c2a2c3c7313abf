"""Opening stores: what is loaded for it, and which endpoints there can be."""

import subprocess
import sys

import pytest

from weighbridge.errors import UsageError
from weighbridge.storage.stores import Profile, open_store


def test_a_directory_loads_no_network_client() -> None:
    code = (
        "import sys; from weighbridge.storage.stores import open_store; open_store('/nowhere'); "
        "print([m for m in ('s3fs', 'gcsfs', 'fsspec', 'aiohttp', 'botocore', 'prefect', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_opening_asks_nothing_and_names_the_endpoint() -> None:
    store = open_store("s3://bucket/run/", profile=Profile(endpoint_url="http://127.0.0.1:1"))
    assert (store.url, store.label) == ("s3://bucket/run", "s3://bucket/run at http://127.0.0.1:1")
    assert open_store("s3://bucket").label == "s3://bucket"


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint_url": "127.0.0.1:9000"},
        {"endpoint_url": "ftp://host"},
        {"endpoint_url": "http://"},
        {"endpoint_url": "https://key:secret@host"},
        {"endpoint_url": "https://host?token=secret"},
        {"call_seconds": 0.0},
        {"parts": 0},
        {"part_bytes": 1 << 20},
        {"part_bytes": (5 << 20) + 1},
    ],
)
def test_a_profile_that_no_endpoint_can_have_is_a_usage_error(options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        Profile(**options)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


def test_the_more_a_request_carries_the_longer_it_may_take() -> None:
    profile = Profile(call_seconds=30.0)
    assert profile.seconds(0) == 30.0
    assert profile.seconds(8 << 20) == 62.0


@pytest.mark.parametrize("url", ["s3://bucket/../run", "s3://bucket/run\n", "gs://bucket/a b\\c", "s3:// /run"])
def test_a_prefix_that_is_no_key_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)

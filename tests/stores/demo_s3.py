"""`make demo-s3`: the demo with its versions on S3, on a SeaweedFS that it starts on free loopback ports and stops."""

import os
import subprocess
import sys

import boto3
from tests.stores.servers import BUCKET, seaweedfs


def main() -> int:
    """Runs the demo; returns its exit code."""
    with seaweedfs() as server:
        os.environ.update(server.environment)
        boto3.client("s3", endpoint_url=server.url).create_bucket(Bucket=BUCKET)
        settings = {"WEIGHBRIDGE_STORE_ENDPOINT": server.url, "WEIGHBRIDGE_STORE_ADDRESSING": "path"}
        command = [sys.executable, "-m", "weighbridge", "demo", "--store", f"s3://{BUCKET}/demo", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

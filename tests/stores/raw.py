"""Roots on servers, seen past the store under test: by boto3 for S3, by plain HTTP for GCS."""

import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

import boto3
from botocore.exceptions import ClientError


class S3Raw:
    def __init__(self, bucket: str, prefix: str) -> None:
        self.client: Any = boto3.client("s3")
        self.bucket = bucket
        self.prefix = prefix

    def set(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}", Body=data)

    def get(self, key: str) -> bytes | None:
        try:
            reply = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}")
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise
        return bytes(reply["Body"].read())

    def keys(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix + "/")
        return sorted(item["Key"].removeprefix(self.prefix + "/") for p in pages for item in p.get("Contents", ()))


class GCSRaw:
    def __init__(self, url: str, bucket: str, prefix: str) -> None:
        self.url = url
        self.bucket = bucket
        self.prefix = prefix

    def set(self, key: str, data: bytes) -> None:
        name = quote(f"{self.prefix}/{key}", safe="")
        self._ask(f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}", data=data)

    def get(self, key: str) -> bytes | None:
        name = quote(f"{self.prefix}/{key}", safe="")
        try:
            return self._ask(f"/storage/v1/b/{self.bucket}/o/{name}?alt=media")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def keys(self) -> list[str]:
        found: list[str] = []
        token = ""
        while True:
            page = json.loads(
                self._ask(f"/storage/v1/b/{self.bucket}/o?prefix={quote(self.prefix)}/&pageToken={token}")
            )
            found += [item["name"].removeprefix(self.prefix + "/") for item in page.get("items", ())]
            token = page.get("nextPageToken", "")
            if not token:
                return sorted(found)

    def make_bucket(self) -> None:
        self._ask(
            "/storage/v1/b?project=test", data=json.dumps({"name": self.bucket}).encode(), kind="application/json"
        )

    def _ask(self, path: str, *, data: bytes | None = None, kind: str = "application/octet-stream") -> bytes:
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return bytes(reply.read())

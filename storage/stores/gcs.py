"""A store in a Google Cloud Storage bucket. The commit is one request with ifGenerationMatch=0, which also carries its
checksum. gcsfs finds endpoint and credentials; requests go through its transport one by one, without its retries
and listing caches. Must not retry a shard: that is `storage/transfer.py`'s."""

import asyncio
import base64
import contextlib
import json
import os
import secrets
from collections.abc import Awaitable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import aiohttp
import google_crc32c
from gcsfs.core import GCSFileSystem, quote
from gcsfs.retry import HttpError
from google.auth.exceptions import GoogleAuthError

from weighbridge.errors import ObjectExists, ObjectMissing, StoreError, StoreRefused, UsageError
from weighbridge.storage.stores.bounded_response import BoundedResponse, most_bytes
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES, ObjectInfo
from weighbridge.storage.stores.keys import checked_create, checked_key, checked_prefix
from weighbridge.storage.stores.profile import Profile
from weighbridge.storage.stores.remote import REPEATABLE, RemoteStore, Verb

T = TypeVar("T")

_SINGLE_BYTES = 5 << 20
_CHUNK_TRIES = 3
_COPY_BYTES = 4 << 20
_ABORT_SECONDS = 5.0
_INCOMPLETE = 308  # GCS's answer to a chunk while more are to come
_UPLOADS = "{0}/upload/storage/v1/b/{1}/o"


class GCSStore(RemoteStore[Any]):
    """Objects of one bucket under a prefix."""

    failures: ClassVar[tuple[type[Exception], ...]] = (
        *RemoteStore.failures,
        aiohttp.ClientError,
        HttpError,
        GoogleAuthError,
        RuntimeError,  # what gcsfs makes of an answer without a status that it knows
    )

    def __init__(self, url: str, *, bucket: str, prefix: str, profile: Profile) -> None:
        super().__init__(url, prefix=prefix, profile=profile)
        self.bucket = bucket

    def create(self, key: str, data: bytes) -> None:
        """See Store."""
        name = self.name(checked_create(key, data))
        self.run(Verb("create", key, len(data)), lambda fs: self._send(fs, name, data, ifGenerationMatch="0"))

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        name = self.name(checked_key(key))
        self.run(Verb("write", key, len(data)), lambda fs: self._send(fs, name, data), tries=REPEATABLE)

    def put_file(self, key: str, path: Path) -> None:
        """See Store. Holds one chunk of `profile.part_bytes`: GCS takes the chunks of an upload one after the other."""
        name = self.name(checked_key(key))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"{path} cannot be read, so it was not uploaded: {error.strerror}.") from error
        try:
            nbytes = os.fstat(descriptor).st_size
            verb = Verb("write", key, nbytes)
            if nbytes <= _SINGLE_BYTES:
                data = os.pread(descriptor, nbytes, 0)
                self.run(verb, lambda fs: self._send(fs, name, data))
            else:
                checksum = _file_checksum(descriptor, nbytes)
                rounds = -(-nbytes // self.profile.part_bytes)
                self.run(
                    verb,
                    lambda fs: self._send_chunks(fs, name, descriptor, nbytes, checksum),
                    seconds=2 * self.profile.call_seconds + rounds * self.profile.seconds(self.profile.part_bytes),
                )
        finally:
            os.close(descriptor)

    def get(self, key: str, *, most: int = MOST_SMALL_BYTES) -> bytes:
        """See Store."""
        return self._read(key, {}, most=most, tries=REPEATABLE)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See Store."""
        data = self._read(key, {"Range": f"bytes={start}-{start + length - 1}"}, most=length, nbytes=length)
        if len(data) != length:
            raise StoreError(f"{key} in {self.label} is too short: {len(data)} of {length} bytes came.")
        return data

    def size(self, key: str) -> int:
        """See Store."""
        name = self.name(checked_key(key))
        found = self.run(
            Verb("read", key),
            lambda fs: fs._call("GET", "b/{}/o/{}", self.bucket, name, fields="size", json_out=True),
            tries=REPEATABLE,
        )
        return int(found["size"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store."""
        return self.list_after(prefix, "")

    def folders(self, prefix: str) -> Iterator[str]:
        """See Store."""
        return self.folders_after(prefix, "")

    def list_after(self, prefix: str, key: str) -> Iterator[ObjectInfo]:
        """See Store."""
        start = {"startOffset": self.name(checked_key(key))} if key else {}  # which is listed itself
        found = [
            ObjectInfo(self.key(item["name"]), int(item["size"]), _nanoseconds(item["updated"]))
            for page in self._pages(checked_prefix(prefix), **start)
            for item in page.get("items", ())
            if not item["name"].endswith("/")  # consoles make such objects to show empty folders
        ]
        return iter(sorted((info for info in found if info.key > key), key=lambda info: info.key))

    def folders_after(self, prefix: str, name: str) -> Iterator[str]:
        """See Store."""
        start = {"startOffset": self.folder(prefix) + name} if name else {}
        found = {
            folder.rstrip("/").rsplit("/", 1)[-1]
            for page in self._pages(checked_prefix(prefix), delimiter="/", **start)
            for folder in page.get("prefixes", ())
        }
        return iter(sorted(folder for folder in found if folder > name))

    def delete(self, key: str) -> None:
        """See Store."""
        name = self.name(checked_key(key))
        with contextlib.suppress(ObjectMissing):
            self.run(
                Verb("delete", key), lambda fs: fs._call("DELETE", "b/{}/o/{}", self.bucket, name), tries=REPEATABLE
            )

    def _read(self, key: str, headers: dict[str, str], *, most: int, nbytes: int = 0, tries: int = 1) -> bytes:
        name = self.name(checked_key(key))

        async def read(fs: Any) -> bytes:
            most_bytes.set(most)  # of this task, which is one call's
            _, data = await fs._call("GET", "b/{}/o/{}", self.bucket, name, alt="media", headers=headers)
            return bytes(data)

        return self.run(Verb("read", key, nbytes), read, tries=tries)

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        """Pages of a listing, each a call with a deadline of its own, so that a long listing can go on."""
        token: dict[str, str] = {}
        while True:
            query = {"prefix": self.folder(prefix), **options, **token}
            page = self.run(
                Verb("list", prefix or "the root"),
                lambda fs, query=query: fs._call("GET", "b/{}/o", self.bucket, json_out=True, **query),  # type: ignore[misc]
                tries=REPEATABLE,
            )
            yield page
            if not page.get("nextPageToken"):
                return
            token = {"pageToken": page["nextPageToken"]}

    async def _send(self, fs: Any, name: str, data: bytes, **condition: str) -> None:
        """One request with description and bytes. The boundary is drawn anew: fixed ones can occur in the bytes."""
        boundary = secrets.token_hex(16)
        checksum = _checksum([data])
        about = json.dumps({"name": name, "crc32c": checksum})
        body = b"".join(
            (
                f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{about}\r\n".encode(),
                f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n".encode(),
                data,
                f"\r\n--{boundary}--".encode(),
            )
        )
        kept = await fs._call(
            "POST",
            _UPLOADS.format(fs._location, quote(self.bucket)),
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{boundary}"'},
            data=body,
            json_out=True,
            **condition,
        )
        await self._check(fs, kept, name, len(data), checksum)

    async def _check(self, fs: Any, kept: dict[str, Any], name: str, nbytes: int, checksum: str) -> None:
        """Whether the store kept what was sent. What it kept instead goes, by its generation: nobody else's object."""
        if (kept.get("name"), int(kept.get("size", -1)), kept.get("crc32c")) == (name, nbytes, checksum):
            return
        await fs._call("DELETE", "b/{}/o/{}", self.bucket, kept["name"], ifGenerationMatch=str(kept["generation"]))
        raise _OtherBytes(f"{kept['name']} was kept with {kept.get('size')} bytes and crc32c {kept.get('crc32c')}")

    async def _send_chunks(self, fs: Any, name: str, descriptor: int, nbytes: int, checksum: str) -> None:
        """A resumable upload: after a chunk that failed the store is asked how far it came."""
        headers, _ = await self._timely(
            fs._call(
                "POST",
                _UPLOADS.format(fs._location, quote(self.bucket)),
                uploadType="resumable",
                name=name,
                json={"name": name, "crc32c": checksum},
                headers={"X-Upload-Content-Length": str(nbytes)},
            )
        )
        location = headers["Location"]
        start, tries = 0, _CHUNK_TRIES
        try:
            while True:
                data = await asyncio.to_thread(os.pread, descriptor, self.profile.part_bytes, start)
                span = f"{start}-{start + len(data) - 1}" if data else "*"
                try:
                    status, headers, body = await self._chunk(fs, location, f"bytes {span}/{nbytes}", data)
                except self.failures:
                    tries -= 1
                    if not tries:
                        raise
                    if await self._stands(fs, name, nbytes, checksum):  # the reply to the last chunk was lost
                        return
                    status, headers, body = await self._chunk(fs, location, f"bytes */{nbytes}", b"")
                if status != _INCOMPLETE:
                    await self._check(fs, json.loads(body), name, nbytes, checksum)
                    return
                start = int(headers["Range"].rsplit("-", 1)[1]) + 1 if "Range" in headers else 0
        except BaseException:
            with contextlib.suppress(*self.failures):
                await asyncio.wait_for(fs._call("DELETE", location), _ABORT_SECONDS)
            raise

    async def _chunk(self, fs: Any, location: str, span: str, data: bytes) -> tuple[int, Any, bytes]:
        status, headers, _, body = await self._timely(
            fs._request("PUT", location, headers={"Content-Range": span}, data=data), nbytes=len(data)
        )
        return status, headers, body

    async def _stands(self, fs: Any, name: str, nbytes: int, checksum: str) -> bool:
        try:
            kept = await self._timely(fs._call("GET", "b/{}/o/{}", self.bucket, name, json_out=True))
        except FileNotFoundError:
            return False
        return (int(kept["size"]), kept["crc32c"]) == (nbytes, checksum)

    async def _timely(self, call: Awaitable[T], *, nbytes: int = 0) -> T:
        return await asyncio.wait_for(call, self.profile.seconds(nbytes))

    async def _connect(self) -> Any:
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")  # Google's clients send no credentials to one either
        fs = _Transport(
            token="anon" if self.profile.anonymous or emulator else None,
            endpoint_url=self.profile.endpoint_url or emulator,
            consistency="none",  # checksums are sent along instead, and shards have digests
            requests_timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=self.profile.call_seconds),
            asynchronous=True,
            loop=asyncio.get_running_loop(),
            skip_instance_cache=True,  # a cached instance would keep expired credentials
            use_listings_cache=False,
            cache_timeout=0,
            session_kwargs={"response_class": BoundedResponse},
        )
        await fs._set_session()
        return fs

    @staticmethod
    async def _disconnect(client: Any) -> None:
        await client.session.close()

    def _is_stale(self, error: Exception) -> bool:
        return isinstance(error, GoogleAuthError) or _status(error) in (401, 403)

    def _told(self, error: Exception, verb: Verb) -> StoreError:
        status = _status(error)
        said = str(error).strip() or type(error).__name__
        if isinstance(error, FileExistsError) and verb.name == "create":
            return ObjectExists(f"{verb.key} exists in {self.label} already; it was left as it is.")
        if status == 404:
            if verb.name in ("read", "delete"):
                return ObjectMissing(f"{verb.key} is not in {self.label}.")
            return StoreRefused(
                f"there is no bucket {self.bucket!r} ({self.label}). Nothing was changed. Create it, or check the URL."
            )
        if self._is_stale(error):
            return StoreRefused(
                f"{self.label} does not let these credentials {verb.name} {verb.key} ({said}), also after reading them "
                "anew. Nothing was changed. Check the application default credentials and their rights on the bucket."
            )
        if status == 416:
            return StoreError(f"{verb.key} in {self.label} is shorter than was asked for ({said}).")
        if isinstance(error, _OtherBytes):
            return StoreError(
                f"{self.label} did not keep the bytes of {verb.key} that were sent: {error}; it was removed."
            )
        if status == 507:
            return StoreRefused(f"{self.label} has no room for {verb.key} ({verb.nbytes} bytes): {said}.")
        return self.unreachable(error, verb)


class _OtherBytes(ValueError):
    """The store kept something else than was sent."""


class _Transport(GCSFileSystem):  # type: ignore[misc]
    """gcsfs without its retries, six a request: this house's own go by a deadline and tell lost replies apart."""

    async def _request(self, *args: Any, **kwargs: Any) -> Any:
        request = GCSFileSystem._request
        return await getattr(request, "__wrapped__", request)(self, *args, **kwargs)


def _status(error: Exception) -> int:
    """gcsfs tells some statuses as built-in errors, and others only in the text."""
    if isinstance(error, HttpError):
        return int(error.code or 0)
    if isinstance(error, FileNotFoundError):
        return 404
    if isinstance(error, FileExistsError):
        return 412
    return 403 if type(error) is OSError and str(error).startswith("Forbidden") else 0


def _file_checksum(descriptor: int, nbytes: int) -> str:
    return _checksum(os.pread(descriptor, _COPY_BYTES, start) for start in range(0, nbytes, _COPY_BYTES))


def _checksum(pieces: Iterable[bytes]) -> str:
    """crc32c as GCS writes it."""
    checksum: Any = google_crc32c.Checksum()  # type: ignore[no-untyped-call]
    for piece in pieces:
        checksum.update(piece)
    return base64.b64encode(checksum.digest()).decode()


def _nanoseconds(moment: str) -> int:
    return int(datetime.fromisoformat(moment).timestamp() * 1e9)

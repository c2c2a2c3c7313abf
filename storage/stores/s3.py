"""A store in an S3 bucket, on Amazon or elsewhere. The commit is one PUT with If-None-Match. s3fs finds endpoint,
region and credentials; requests go through its client one by one: its file calls nest retries, cache listings, and hide
which condition failed. Must not retry a shard: `storage/transfer.py` does."""

import asyncio
import contextlib
import os
import zlib
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError
from botocore.parsers import ResponseParserError

from weighbridge.errors import ObjectExists, ObjectMissing, StoreError, StoreRefused, StoreUnfit, UsageError
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES, ObjectInfo, Unfinished, too_large
from weighbridge.storage.stores.keys import checked_create, checked_key, checked_prefix
from weighbridge.storage.stores.profile import Profile
from weighbridge.storage.stores.remote import REPEATABLE, RemoteStore, Verb

_PART_TRIES = 3
_MAX_PARTS = 10_000
_ABORT_SECONDS = 5.0

# Answers that mean "read your credentials again"; a denied access may be one whose token was taken back.
_STALE = {
    "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired", "AccessDenied",
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "AuthorizationHeaderMalformed", "Unauthorized",
    "401", "403",
}  # fmt: skip
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "507"}
# Answers that will be the same next time. Other 4xx may be the network's doing: one flipped bit is enough.
_REFUSED = {
    "InvalidBucketName", "PermanentRedirect", "IllegalLocationConstraintException", "AuthorizationHeaderMalformed",
    "MethodNotAllowed", "AccountProblem", "AllAccessDisabled", "EntityTooLarge", "KeyTooLongError", "301",
}  # fmt: skip


class S3Store(RemoteStore[Any]):
    """Objects of one bucket under a prefix. Needs a server that honours `If-None-Match: *` on PUT (see `probe`)."""

    failures: ClassVar[tuple[type[Exception], ...]] = (
        *RemoteStore.failures,
        BotoCoreError,
        ClientError,
        ResponseParserError,
        aiohttp.ClientError,
    )

    def __init__(self, url: str, *, bucket: str, prefix: str, profile: Profile) -> None:
        super().__init__(url, prefix=prefix, profile=profile)
        self.bucket = bucket

    def create(self, key: str, data: bytes) -> None:
        """See Store."""
        name = self.name(checked_create(key, data))
        self.run(
            Verb("create", key, len(data)),
            lambda s3: s3.put_object(Bucket=self.bucket, Key=name, Body=data, IfNoneMatch="*"),
        )

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        name = self.name(checked_key(key))
        self.run(
            Verb("write", key, len(data)),
            lambda s3: s3.put_object(Bucket=self.bucket, Key=name, Body=data),
            tries=REPEATABLE,
        )

    def put_file(self, key: str, path: Path) -> None:
        """See Store. Holds `profile.parts` parts of `profile.part_bytes` at most; a part is tried again by itself."""
        name = self.name(checked_key(key))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"{path} cannot be read, so it was not uploaded: {error.strerror}.") from error
        try:
            nbytes = os.fstat(descriptor).st_size
            verb = Verb("write", key, nbytes)
            if nbytes <= self.profile.part_bytes:
                data = os.pread(descriptor, nbytes, 0)
                self.run(verb, lambda s3: s3.put_object(Bucket=self.bucket, Key=name, Body=data))
            else:
                upload = _Upload(self.bucket, name, descriptor, nbytes, self.profile)
                self.run(verb, upload.run, seconds=upload.seconds)
        finally:
            os.close(descriptor)

    def get(self, key: str, *, most: int = MOST_SMALL_BYTES) -> bytes:
        """See Store."""
        name = self.name(checked_key(key))

        async def read(s3: Any) -> tuple[int, bytes]:
            reply = await s3.get_object(Bucket=self.bucket, Key=name)
            nbytes = int(reply["ContentLength"])
            if nbytes > most:
                reply["Body"].close()
                return nbytes, b""
            return nbytes, await _body(reply)

        nbytes, data = self.run(Verb("read", key), read, tries=REPEATABLE)
        if nbytes > most:
            raise too_large(key, self.label, nbytes, most)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See Store."""
        name = self.name(checked_key(key))
        wanted = f"bytes={start}-{start + length - 1}"

        async def read(s3: Any) -> bytes:
            reply = await s3.get_object(Bucket=self.bucket, Key=name, Range=wanted)
            if reply["ContentLength"] != length:
                reply["Body"].close()
                raise EOFError(f"{reply['ContentLength']} bytes came for {wanted}")
            return await _body(reply)

        return self.run(Verb("read", key, length), read)

    def size(self, key: str) -> int:
        """See Store."""
        name = self.name(checked_key(key))
        reply = self.run(Verb("read", key), lambda s3: s3.head_object(Bucket=self.bucket, Key=name), tries=REPEATABLE)
        return int(reply["ContentLength"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store."""
        return self.list_after(prefix, "")

    def folders(self, prefix: str) -> Iterator[str]:
        """See Store."""
        return self.folders_after(prefix, "")

    def list_after(self, prefix: str, key: str) -> Iterator[ObjectInfo]:
        """See Store."""
        start = {"StartAfter": self.name(checked_key(key))} if key else {}
        found = [
            ObjectInfo(self.key(item["Key"]), int(item["Size"]), _nanoseconds(item["LastModified"]))
            for page in self._pages(checked_prefix(prefix), **start)
            for item in page.get("Contents", ())
            if not item["Key"].endswith("/")  # consoles make such objects to show empty folders
        ]
        return iter(sorted((i for i in found if i.key > key), key=lambda i: i.key))  # not every server lists in order

    def folders_after(self, prefix: str, name: str) -> Iterator[str]:
        """See Store."""
        start = {"StartAfter": self.folder(prefix) + name} if name else {}
        found = {
            item["Prefix"].rstrip("/").rsplit("/", 1)[-1]
            for page in self._pages(checked_prefix(prefix), Delimiter="/", **start)
            for item in page.get("CommonPrefixes", ())
        }
        return iter(sorted(folder for folder in found if folder > name))

    def delete(self, key: str) -> None:
        """See Store."""
        name = self.name(checked_key(key))
        with contextlib.suppress(ObjectMissing):
            self.run(Verb("delete", key), lambda s3: s3.delete_object(Bucket=self.bucket, Key=name), tries=REPEATABLE)

    def unfinished(self) -> Iterator[Unfinished]:
        """See Store: multipart uploads. What their parts weigh is not asked."""
        marker: dict[str, str] = {}
        while True:
            query = dict(marker)
            page = self.run(
                Verb("list", "unfinished uploads"),
                lambda s3, query=query: s3.list_multipart_uploads(  # type: ignore[misc]
                    Bucket=self.bucket, Prefix=self.folder(""), **query
                ),
                tries=REPEATABLE,
            )
            for item in page.get("Uploads", ()):
                yield Unfinished(self.key(item["Key"]), item["UploadId"], 0, _nanoseconds(item["Initiated"]))
            if not page.get("IsTruncated"):
                return
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def discard(self, unfinished: Unfinished) -> None:
        """See Store."""
        name = self.name(checked_key(unfinished.key))
        with contextlib.suppress(ObjectMissing):
            self.run(
                Verb("delete", unfinished.key),
                lambda s3: s3.abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=unfinished.handle),
                tries=REPEATABLE,
            )

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        """Pages of a listing, each a call with a deadline of its own, so that a long listing can go on."""
        token: dict[str, str] = {}
        while True:
            query = {**options, **token}
            page = self.run(
                Verb("list", prefix or "the root"),
                lambda s3, query=query: s3.list_objects_v2(Bucket=self.bucket, Prefix=self.folder(prefix), **query),  # type: ignore[misc]
                tries=REPEATABLE,
            )
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    async def _connect(self) -> Any:
        profile = self.profile
        seconds = max(1.0, profile.call_seconds / 2)
        fs = s3fs.S3FileSystem(
            anon=profile.anonymous,
            profile=profile.credentials_profile,
            endpoint_url=profile.endpoint_url,
            client_kwargs={"region_name": profile.region} if profile.region else {},
            config_kwargs={
                "s3": {"addressing_style": profile.addressing},
                "request_checksum_calculation": profile.checksums,
                "response_checksum_validation": profile.checksums,
                "retries": {"total_max_attempts": 2, "mode": "standard"},
                "connect_timeout": min(10.0, seconds),
                "read_timeout": seconds,
                "max_pool_connections": 32,
            },
            asynchronous=True,
            loop=asyncio.get_running_loop(),
            skip_instance_cache=True,  # a cached instance would keep expired credentials
            use_listings_cache=False,
        )
        return await fs.set_session()

    @staticmethod
    async def _disconnect(client: Any) -> None:
        await client.close()

    def _is_stale(self, error: Exception) -> bool:
        return isinstance(error, NoCredentialsError) or (isinstance(error, ClientError) and _code(error) in _STALE)

    def _told(self, error: Exception, verb: Verb) -> StoreError:
        if isinstance(error, EOFError):
            return StoreError(f"{verb.key} in {self.label} is shorter than was asked for: {error}.")
        if isinstance(error, NoCredentialsError):
            return StoreRefused(
                f"no credentials were found for {self.label}. Nothing was changed. Set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or run where the provider gives a role."
            )
        if isinstance(error, ParamValidationError):
            return StoreRefused(
                f"{self.label} cannot be asked to {verb.name} {verb.key}: {error}. Nothing was changed."
            )
        if isinstance(error, ClientError):
            return self._answered(error, verb)
        return self.unreachable(error, verb)

    def _answered(self, error: ClientError, verb: Verb) -> StoreError:
        """What the server's own answer means. Its status is looked at where a reply without body has no code."""
        code, status = _code(error), int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        said = f"{code}: {error.response.get('Error', {}).get('Message', '') or 'no reason given'}"
        if code == "NoSuchBucket":
            return StoreRefused(
                f"there is no bucket {self.bucket!r} ({self.label}). Nothing was changed. Create it, or check the URL."
            )
        if verb.name == "create" and (code == "PreconditionFailed" or status == 412):
            return ObjectExists(f"{verb.key} exists in {self.label} already; it was left as it is.")
        if verb.name == "create" and (code == "NotImplemented" or status == 501):
            return StoreUnfit(
                f"the store {self.label} refuses conditional writes ({said}), so no commit on it would be safe. "
                "Nothing was published. Use a store that honours If-None-Match."
            )
        if code == "InvalidRange" or status == 416:
            return StoreError(f"{verb.key} in {self.label} is shorter than was asked for ({said}).")
        if code in ("NoSuchKey", "404", "NotFound") or (verb.name == "delete" and code == "NoSuchUpload"):
            return ObjectMissing(f"{verb.key} is not in {self.label}.")
        if code in _FULL or status == 507:
            return StoreRefused(
                f"{self.label} has no room for {verb.key} ({verb.nbytes} bytes): {said}. What was there is untouched. "
                "Free some space, then do the same again."
            )
        if code in _STALE - _REFUSED or status in (401, 403):
            return StoreRefused(
                f"{self.label} does not let these credentials {verb.name} {verb.key} ({said}), also after reading them "
                "anew. Nothing was changed. Check the credentials, their rights on the bucket, and the clock."
            )
        if code in _REFUSED:
            return StoreRefused(
                f"{self.label} refused to {verb.name} {verb.key} ({said}). Nothing was changed. Check the bucket's "
                "name, the endpoint and the region."
            )
        return StoreError(f"{self.label} could not {verb.name} {verb.key} ({said}).")


class _Upload:
    """One multipart upload of a file, begun, filled by a few parts at a time, and ended or aborted."""

    def __init__(self, bucket: str, name: str, descriptor: int, nbytes: int, profile: Profile) -> None:
        self._where = {"Bucket": bucket, "Key": name}
        self._descriptor = descriptor
        self._nbytes = nbytes
        self._profile = profile
        self._part_bytes = max(profile.part_bytes, -(-nbytes // _MAX_PARTS))
        self._starts = range(0, nbytes, self._part_bytes)

    @property
    def seconds(self) -> float:
        """A deadline that an upload keeps as long as every part keeps its own."""
        rounds = -(-len(self._starts) // self._profile.parts)
        return 2 * self._profile.call_seconds + rounds * self._profile.seconds(self._part_bytes)

    async def run(self, s3: Any) -> None:
        """All of it. Cancelled or failed, it asks the server to drop the parts, briefly; gc collects what stays."""
        begun = await self._bounded(lambda: s3.create_multipart_upload(**self._where))
        upload_id = begun["UploadId"]
        try:
            gate = asyncio.Semaphore(self._profile.parts)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._part(s3, upload_id, n, gate)) for n in range(len(self._starts))]
            parts = [{"PartNumber": n + 1, "ETag": task.result()} for n, task in enumerate(tasks)]
            await self._complete(s3, upload_id, parts)
        except BaseExceptionGroup as group_error:
            await self._abort(s3, upload_id)
            raise group_error.exceptions[0] from group_error
        except BaseException:
            await self._abort(s3, upload_id)
            raise

    async def _part(self, s3: Any, upload_id: str, number: int, gate: asyncio.Semaphore) -> str:
        start = self._starts[number]
        async with gate:
            length = min(self._part_bytes, self._nbytes - start)
            part = await asyncio.to_thread(self._read, start, length)
            for _ in range(_PART_TRIES - 1):
                with contextlib.suppress(*S3Store.failures):
                    return await self._send(s3, upload_id, number, part)
            return await self._send(s3, upload_id, number, part)

    def _read(self, start: int, length: int) -> dict[str, Any]:
        """A part, and the checksum that the client would else compute in its loop, where other parts wait for it."""
        data = os.pread(self._descriptor, length, start)
        if self._profile.checksums == "when_required":
            return {"Body": data}
        return {"Body": data, "ChecksumCRC32": b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}

    async def _send(self, s3: Any, upload_id: str, number: int, part: dict[str, Any]) -> str:
        reply = await self._bounded(
            lambda: s3.upload_part(**self._where, UploadId=upload_id, PartNumber=number + 1, **part),
            nbytes=len(part["Body"]),
        )
        return str(reply["ETag"])

    async def _complete(self, s3: Any, upload_id: str, parts: list[dict[str, Any]]) -> None:
        """When the reply to this request was lost, the next one is told that there is no such upload: then the object
        is there, with its size, if the lost request was carried out."""
        try:
            await self._bounded(
                lambda: s3.complete_multipart_upload(
                    **self._where, UploadId=upload_id, MultipartUpload={"Parts": parts}
                )
            )
        except ClientError as error:
            if _code(error) != "NoSuchUpload":
                raise
            try:
                reply = await self._bounded(lambda: s3.head_object(**self._where))
            except ClientError:
                raise error from None
            if int(reply["ContentLength"]) != self._nbytes:
                raise

    async def _abort(self, s3: Any, upload_id: str) -> None:
        with contextlib.suppress(*S3Store.failures):
            await asyncio.wait_for(s3.abort_multipart_upload(**self._where, UploadId=upload_id), _ABORT_SECONDS)

    async def _bounded(self, call: Callable[[], Awaitable[Any]], *, nbytes: int = 0) -> Any:
        return await asyncio.wait_for(call(), self._profile.seconds(nbytes))


async def _body(reply: dict[str, Any]) -> bytes:
    async with reply["Body"] as stream:
        return bytes(await stream.read())


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1e9)

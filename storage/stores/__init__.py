"""The kinds of store, one file each, opened by URL. A kind is imported only when a URL asks for it; nothing outside
this folder knows which kind it has."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from weighbridge.errors import UsageError
from weighbridge.storage.stores.contract import ObjectInfo, Store
from weighbridge.storage.stores.keys import checked_prefix
from weighbridge.storage.stores.profile import Profile

__all__ = ["ObjectInfo", "Profile", "Store", "open_store"]


def open_store(url: str, *, profile: Profile | None = None) -> Store:
    """The store at a URL or path: a plain path, `file:///dir`, `s3://bucket/prefix`, `gs://bucket/prefix`, or any other
    URL that fsspec opens and whose client can create conditionally.

    Asks nothing yet: a missing bucket or directory shows at the first call, and a writer calls `probe` before its first
    commit. `profile` says how an endpoint is spoken to; credentials come from the provider's own chain. Raises
    UsageError for a URL that no kind of store answers to, or that holds a credential.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return _directory(Path(url).expanduser(), url)
    parts = urlsplit(url)
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise UsageError(f"{url!r} is not a directory on this machine: write file:///the/directory, or the path.")
        return _directory(Path(unquote(parts.path)), url)
    if "@" in parts.netloc:
        raise UsageError(
            f"a {scheme}:// URL must not hold a credential: put it into the environment or the provider's "
            "configuration file, where it is not printed. Nothing was opened."
        )
    bucket, _, prefix = rest.rstrip("/").partition("/")
    if not bucket or bucket != bucket.strip():
        raise UsageError(f"{url!r} names no bucket: write {scheme}://bucket/prefix. Nothing was opened.")
    checked_prefix(prefix)
    safe_url = f"{scheme}://{rest.rstrip('/')}"
    if scheme in ("s3", "s3a"):
        from weighbridge.storage.stores.s3 import S3Store

        return S3Store(safe_url, bucket=bucket, prefix=prefix, profile=profile or Profile())
    if scheme in ("gs", "gcs"):
        from weighbridge.storage.stores.gcs import GCSStore

        return GCSStore(safe_url, bucket=bucket, prefix=prefix, profile=profile or Profile())
    from weighbridge.storage.stores.fsspec_store import FsspecStore

    return FsspecStore(safe_url, profile=profile or Profile())


def _directory(root: Path, url: str) -> Store:
    from weighbridge.storage.stores.directory import DirectoryStore

    if not url.strip() or "\0" in url:
        raise UsageError(f"{url!r} names no store: give a path or a URL.")
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file, not a directory, so it cannot hold a store. Nothing was touched.")
    return DirectoryStore(root)

"""The kinds of store, one file each, opened by URL. A kind is imported only when a URL asks for it; nothing outside
this folder knows which kind it has."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from weighbridge.errors import UsageError
from weighbridge.storage.stores.contract import ObjectInfo, Store

__all__ = ["ObjectInfo", "Store", "open_store"]


def open_store(url: str) -> Store:
    """The store at a URL or path: `file:///dir`, or a plain path.

    Opens nothing and asks nothing yet: a missing bucket or directory shows at the first call, and a writer calls
    `probe` before its first commit. Raises UsageError for a URL that no kind of store answers to.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return _directory(Path(url).expanduser(), url)
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise UsageError(f"{url!r} is not a directory on this machine: write file:///the/directory, or the path.")
        return _directory(Path(unquote(parts.path)), url)
    raise UsageError(
        f"{scheme!r} is not a kind of store that is known here ({rest!r} was to be opened on it). "
        "Use a path or file:///directory."
    )


def _directory(root: Path, url: str) -> Store:
    from weighbridge.storage.stores.directory import DirectoryStore

    if not url.strip() or "\0" in url:
        raise UsageError(f"{url!r} names no store: give a path or a URL.")
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file, not a directory, so it cannot hold a store. Nothing was touched.")
    return DirectoryStore(root)

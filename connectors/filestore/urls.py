"""A `FileStore` by its URL or path. Credentials come from the environment: a URL holds none, and is shown as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from exactlyonce.checkpoint.records.storage_url import is_url, parts_of, storage_url
from exactlyonce.connectors.filestore.store import STORAGE, FileStore
from exactlyonce.pipeline.errors import ConfigError, InvariantViolation


def store_at(url: str, inner: str, what: str = STORAGE, *, makes_root: bool = False) -> FileStore:
    """The folder *inner* below *url*, from `storage_url`; its errors begin with *what*. Nothing is connected yet.

    A local *url* must exist, lest a disk that is not mounted be taken for an empty one; or *makes_root* creates it.
    """
    scheme, host, path = parts_of(url)
    match scheme:  # each imported for itself: a process opens few kinds
        case "file":
            from exactlyonce.connectors.filestore.local import LocalStore

            return LocalStore(Path("/", path), inner, what, makes_root=makes_root)
        case "s3":
            from exactlyonce.connectors.filestore.s3 import S3Store

            return S3Store(host, f"{path}/{inner}".strip("/"), what)
        case "hdfs":
            from exactlyonce.connectors.filestore.hdfs import HdfsStore

            return HdfsStore(host, path, inner, what)
    raise InvariantViolation(f"no storage for {url}")


def store_of(path: str, what: str) -> FileStore:
    """The folder *path*, which has no `path_problems`. The parent of a folder of this machine must exist."""
    if is_url(path):
        return store_at(storage_url(path), "", what)
    from exactlyonce.connectors.filestore.local import LocalStore

    return LocalStore(Path(path).parent, Path(path).name, what)


def path_problems(path: str) -> Iterator[str]:
    """The problems of a source's or a sink's folder; no URL is shown, for it may hold a password.

    >>> list(path_problems("/data/orders")), list(path_problems("gs://lake/orders"))
    ([], ['path: gs:// has no files here: give a path from / on, s3://bucket/prefix or hdfs://host:port/folder'])
    """
    scheme = path.partition("://")[0].lower()
    if is_url(path) and scheme in ("s3", "hdfs"):
        try:
            storage_url(path, "path")
        except ConfigError as error:
            yield str(error).rstrip(".")
    elif is_url(path):
        yield f"path: {scheme}:// has no files here: give a path from / on, s3://bucket/prefix or hdfs://host:port/folder"
    elif not path.startswith("/"):
        yield f"{path!r} must be the folder's path from / on: workers may run in another folder than this process"
    elif "\x00" in path:
        yield f"{path!r} has a NUL in it, which no path can have"
    elif Path(path) == Path("/"):
        yield "the root of the file system cannot be the folder: name one in it"

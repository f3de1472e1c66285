"""The URL of a storage outside of the checkpoint topic, as settings give it and manifests hold it.

Invariant: a URL that `storage_url` returns holds no secret, and has one spelling.
"""

from __future__ import annotations

import re

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import setting

TOPIC = ""
"""The default: blocks lie in the checkpoint topic itself."""
SCHEMES = ("file", "hdfs", "s3")
_FORMS = "/folder, hdfs://host:port/folder or s3://bucket/prefix"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(/.*)?\Z", re.DOTALL)
_BUCKET = re.compile(r"[^:@]*")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:@]*)(:[0-9]+)?")
"""Anything else before the path is a user and a password, which may hold a slash."""


def storage_setting(text: str) -> str:
    """The value of the setting checkpoint_storage: `TOPIC`, or a `storage_url`.

    >>> storage_setting("topic"), storage_setting("file:///mnt/checkpoints/")
    ('', 'file:///mnt/checkpoints')
    """
    if text in ("topic", TOPIC):
        return TOPIC
    return storage_url(text, setting("checkpoint_storage"), or_else="topic, the default")


def setting_of(storage: str) -> str:
    """The setting checkpoint_storage for *storage*.

    >>> setting_of(TOPIC), setting_of("file:///mnt/checkpoints")
    ('topic', 'file:///mnt/checkpoints')
    """
    return storage or "topic"


def storage_url(text: str, named: str = "The URL of a storage", *, or_else: str = "") -> str:
    """*text* in its one spelling; an absolute path is a folder of this machine.

    Raises ConfigError if it is no URL of a storage. *named* is its option, which may take *or_else*, too.

    >>> storage_url("/mnt/checkpoints/"), storage_url("s3://shop//prod")
    ('file:///mnt/checkpoints', 's3://shop/prod')
    """

    def wrong(why: str) -> ConfigError:
        return ConfigError(f"{named}: {why}. Write {_FORMS}{or_else and f'; or {or_else}'}.")

    match = _URL.match(f"file://{text}" if text.startswith("/") else text)
    if match is None:
        raise wrong("it is neither a URL nor an absolute path")
    scheme, host, path = match[1].lower(), match[2], match[3] or ""
    if not (_BUCKET if scheme == "s3" else _HOST).fullmatch(host):  # before any of it is shown
        raise wrong(
            "it holds a user or a password, which would be kept, and shown. Leave them out: S3 takes them from the "
            "environment, HDFS from Kerberos or HADOOP_USER_NAME"
        )
    if "?" in text or "#" in text:
        raise wrong("it has a query or a fragment, which would be kept, and shown. Leave it out")
    if scheme not in SCHEMES:
        raise wrong(f"there is no storage {scheme}://")
    parts = [part for part in path.split("/") if part]
    if ".." in parts or "." in parts or not text.isprintable():
        raise wrong("its path is not written out")
    if scheme == "file" and (host or not parts):
        raise wrong("a folder of this machine has three slashes and a name")
    if scheme != "file" and not host:
        raise wrong(f"{'the bucket' if scheme == 's3' else 'the host'} is missing")
    return "/".join([f"{scheme}://{host}", *parts])


def is_url(text: str) -> bool:
    """Whether *text* is a URL, and no path.

    >>> is_url("s3://shop/prod"), is_url("/mnt/checkpoints")
    (True, False)
    """
    return "://" in text


def parts_of(url: str) -> tuple[str, str, str]:
    """(scheme, host or bucket, path without its first slash) of a URL that `storage_url` has made.

    >>> parts_of("s3://shop/prod/eu")
    ('s3', 'shop', 'prod/eu')
    """
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    return scheme, host, path


def described(url: str) -> str:
    """A storage for people.

    >>> described(TOPIC), described("s3://shop/prod")
    ('the checkpoint topic', 's3://shop/prod')
    """
    return url or "the checkpoint topic"

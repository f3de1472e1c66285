"""Tables whose folder is on a disk of this machine, or on a mounted one: NFS."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from exactlyonce.sinks.files.folders import sync_folder


def local_path(address: str) -> Path | None:
    """The path that *address* names; None if it is no path.

    >>> str(local_path("/lake/a#b")), str(local_path("file:///lake")), local_path("s3://lake")
    ('/lake/a#b', '/lake', None)
    """
    if address.startswith("/"):
        return Path(address)
    parts = urlsplit(address)
    return Path(parts.path) if parts.scheme == "file" else None


def sync(files: Sequence[Path], top: Path) -> None:
    """Make *files* durable, and the names of their folders as far up as *top*, or as a folder that has *top* in it."""
    folders = set[Path]()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        shared = os.path.commonpath([file, top])
        folders |= {folder for folder in file.parents if folder.is_relative_to(shared)}
    for folder in sorted(folders):
        sync_folder(folder)

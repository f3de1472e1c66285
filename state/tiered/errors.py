"""The errors of local files. Nothing is lost with either: the blocks of checkpoints are the truth."""

from __future__ import annotations

from exactlyonce.pipeline.errors import ExactlyOnceError
from exactlyonce.state.errors import SnapshotDeclined


class DiskFull(SnapshotDeclined):
    """There is no room for local files; the work that needs it waits."""


class LocalFilesFailed(ExactlyOnceError):
    """RocksDB could not read or write its files. The job restarts, and reads blocks instead of them."""

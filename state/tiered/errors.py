"""The errors of local files. Neither loses anything: the blocks of checkpoints are the truth."""

from __future__ import annotations

from exactlyonce.pipeline.errors import ExactlyOnceError
from exactlyonce.state.errors import SnapshotDeclined


class DiskFull(SnapshotDeclined):
    """There is no room for local files; what needs it waits."""


class LocalFilesFailed(ExactlyOnceError):
    """RocksDB could not read or write its files. They are not used again; the job restarts, and reads blocks."""

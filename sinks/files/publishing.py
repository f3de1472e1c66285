"""Publishing: what waits in a committable appears under the names by which readers find it.

A repeated publication does what is left, wherever another process is or has died.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.files.layout import STAGED, StagedList, WaitingFile, decode_staged
from exactlyonce.sinks.files.place import Place, WaitingFileGone


def listed(place: Place, body: StagedList) -> tuple[WaitingFile, ...]:
    """The files of a committable."""
    path = f"{STAGED}/{body.path}"
    content = place.read(path)
    if content is None:
        raise WaitingFileGone(f"{place.root}/{path}")
    if hashlib.sha256(content).digest() != body.sha256:
        raise StoreError(
            f"{place.root}/{path} is not what was written there: another program, or the disk, has changed it."
        )
    return decode_staged(content)


def forget(place: Place, body: StagedList) -> None:
    """Remove the list of files that are published."""
    place.remove(f"{STAGED}/{body.path}")


def publish_all(place: Place, body: StagedList, files: Sequence[WaitingFile]) -> None:
    """Publish the *files* of *body*, without the ledger."""
    place.publish(files, place.waiting(files))
    forget(place, body)

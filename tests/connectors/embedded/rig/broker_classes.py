"""The archive of the broker's loaded classes, which nearly halves the time of a start.

A Java runtime ignores an archive of another runtime or of other jars. An archive appears by one rename. Only callers
that ask for it wait for it, such as `make test`, which starts some dozens of brokers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.connectors.embedded.jars import KAFKA_VERSION, class_archive, kafka_jars
from exactlyonce.connectors.embedded.programs import find_java
from exactlyonce.connectors.embedded.progress import Progress, told_on
from exactlyonce.pipeline.errors import UserError


class _Archiving(EmbeddedBroker):
    """A broker whose runtime writes its loaded classes to *draft* at its end."""

    def __init__(self, folder: Path, draft: Path) -> None:
        super().__init__(folder, port=0, lifetime="process")
        self._draft = draft

    def _java_options(self, java: Path, jars: Path) -> list[str]:
        return [f"-XX:ArchiveClassesAtExit={self._draft}", *super()._java_options(java, jars)]


def ensure_class_archive(progress: Progress) -> Path | None:
    """The archive, created unless it exists; None if this runtime cannot make one."""
    java = find_java()
    archive = class_archive(java, kafka_jars(progress))
    if not archive.exists():
        progress(f"Archiving the classes of Kafka {KAFKA_VERSION} (some seconds, once).")
        with tempfile.TemporaryDirectory(prefix=f"{archive.name}.part-", dir=archive.parent) as folder:
            draft = Path(folder, archive.name)
            broker = _Archiving(Path(folder, "broker"), draft)
            broker.start()
            broker.stop()
            if not draft.exists():
                progress("This Java runtime makes no archive of classes: brokers start without one.")
                return None
            draft.rename(archive)
    return archive


if __name__ == "__main__":
    try:
        ensure_class_archive(told_on(sys.stderr))
    except UserError as error:
        sys.exit(f"exactlyonce: {error}")

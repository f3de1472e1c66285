"""The archive of the broker's classes, as they are once loaded: with it a broker costs little more than half the time.

A Java runtime takes an archive that was made by the same runtime from the same jars, and passes any other over: one
that does not fit costs time and nothing else. An archive appears by one rename. Nobody waits for it who does not ask
for it: `make test` does, which starts a broker some dozens of times.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.connectors.embedded.jars import KAFKA_VERSION, class_archive, kafka_jars
from exactlyonce.connectors.embedded.java import find_java
from exactlyonce.connectors.embedded.progress import Progress, told_on
from exactlyonce.pipeline.errors import UserError


class _Archiving(EmbeddedBroker):
    """A broker whose runtime writes, as it ends, what it has loaded to *draft*."""

    def __init__(self, folder: Path, draft: Path) -> None:
        super().__init__(folder, port=0, lifetime="process")
        self._draft = draft

    def _java_options(self, java: Path, jars: Path) -> list[str]:
        return [f"-XX:ArchiveClassesAtExit={self._draft}", *super()._java_options(java, jars)]


def ensure_class_archive(progress: Progress) -> Path | None:
    """The archive, made if it is not there yet; None where this runtime makes none."""
    java = find_java()
    archive = class_archive(java, kafka_jars(java, progress))
    if not archive.exists():
        progress(f"Archiving the classes of Kafka {KAFKA_VERSION} (some seconds, once).")
        with tempfile.TemporaryDirectory(prefix=f"{archive.name}.part-", dir=archive.parent) as folder:
            draft = Path(folder, archive.name)
            broker = _Archiving(Path(folder, "broker"), draft)
            broker.start()
            broker.stop()
            if not draft.exists():
                progress("This Java runtime makes no archive of classes: brokers start as they did.")
                return None
            draft.rename(archive)
    return archive


if __name__ == "__main__":
    try:
        ensure_class_archive(told_on(sys.stderr))
    except UserError as error:
        sys.exit(f"exactlyonce: {error}")

"""A file of DuckDB: writers and committers of a sink "out" of pipeline "shop", and another program's hands at it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import duckdb
import msgspec
from flushing import staged

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.sinks import DuckDBSink
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.writer import Opened, WriterContext
from exactlyonce.testing.sink_contract.hooks import ORIGIN, MemoryBlocks, MemoryStaging

_HOLDS = "import sys, duckdb\nheld = duckdb.connect(sys.argv[1], read_only=True)\nprint('held', flush=True)\ninput()"


@contextmanager
def held(path: str | os.PathLike[str]) -> Iterator[int]:
    """Another process reads the file, and has it open; -> its pid."""
    command = [sys.executable, "-c", _HOLDS, os.fspath(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process.pid
        finally:
            process.kill()


def asked(path: str | os.PathLike[str], statement: str) -> list[tuple[Any, ...]]:
    """The rows of a statement, which is committed."""
    with duckdb.connect(Path(path)) as connection:
        rows: list[tuple[Any, ...]] = connection.execute(statement).fetchall()
        return rows


class DuckDBTable:
    """The table `totals` of a file, and the sink that writes rows of *type_* to it."""

    def __init__(self, path: Path, type_: Any, **options: Any) -> None:
        self.path, self.type = path, type_
        self.sink = DuckDBSink[Any](path, **{"table": "totals", "create": True, **options})
        self.blocks = MemoryBlocks()
        self._lives = 0

    def asked(self, statement: str) -> list[tuple[Any, ...]]:
        return asked(self.path, statement)

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows in their order."""
        return self.asked("SELECT * FROM totals ORDER BY rowid")

    def committer(self, blocks: Any = None) -> Committer:
        assert list(self.sink.problems(self.type)) == []
        context = CommitterContext(pipeline="shop", sink="out", type=self.type, blocks=blocks or self.blocks)
        return self.sink.open_committer(context)

    def led(self, incarnation: int = 1) -> Committer:
        committer = self.committer()
        committer.check()
        committer.fence(incarnation, ORIGIN)
        return committer

    def opened(self) -> Opened:
        self._lives += 1
        return self.sink.open_writer(
            WriterContext(
                pipeline="shop", sink="out", subtask=0, incarnation=self._lives, attempt=0, type=self.type,
                clients=cast(Any, None), staging=MemoryStaging(self.blocks, "out", 0, self._lives),
            )
        )  # fmt: skip

    def staged(self, records: Sequence[Any], checkpoint: int = 1, batch: int = 1000) -> StoreCommittable:
        """Records in batches, as rows that wait; the checkpoint before has been committed."""
        writer, encoder = self.opened()
        for start in range(0, len(records), batch):
            writer.write(encoder.encode(records[start : start + batch]))
        writer.barrier(checkpoint)
        return msgspec.structs.replace(staged(writer, checkpoint), previous=checkpoint - 1)

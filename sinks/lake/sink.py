"""The common part of lake sinks: the description, which opens nothing, and the committer, one commit of the table for
all of a checkpoint.

Invariant: what is committed is decided by the ledger of the very state of the table that the commit replaces.
"""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.columns import Column, columns_of
from exactlyonce.pipeline.errors import ASKED_AGAIN, ConfigError, StoreError, StoreUnavailable
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.grants import Grants, s3_grants
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.secrets import is_reference, reference_problem
from exactlyonce.pipeline.sink import Sink
from exactlyonce.pipeline.sizes import Size, byte_count, size_problems
from exactlyonce.sinks.committer import Committer, CommitterContext, StoreView
from exactlyonce.sinks.files.layout import WriterId
from exactlyonce.sinks.lake.table import S3_ON_BUCKET, S3_ON_OBJECTS, Conflict, Lake, LoadedTable, StagedFiles
from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger
from exactlyonce.sinks.sql.table import KeyedTable, description_problems, row_problems, row_type
from exactlyonce.sinks.writer import Opened, SinkEncoder, WriterContext

T = TypeVar("T")
MODES = ("append", "upsert")
_SECRET = re.compile(r"token$|credential|password|secret|access.?key|account.?key|sas|://[^/@]*:[^@]*@", re.IGNORECASE)


ATTEMPTS_MAX = 20
"""Commits that other writers may overtake, one after the other, before the store counts as away."""


class LakeSink(KeyedTable, Sink[T]):
    """A sink whose rows are in files until their checkpoint is decided; it is exactly once alone."""

    kind: ClassVar[str]
    """The kind of its committables, which is also the name of the extra."""
    library: ClassVar[str]
    """The package of the extra."""
    create: bool
    roll_bytes: Size

    @property
    def transactional(self) -> bool:
        """False: files wait in no Kafka transaction."""
        return False

    @property
    def stages(self) -> bool:
        """True."""
        return True

    def problems(self, type_: Any) -> Iterator[str]:
        """The problems of the common arguments, and of the type as rows of a table."""
        if self.mode not in MODES:
            yield f"mode={self.mode!r} must be one of {', '.join(map(repr, MODES))}"
        wrong = list(description_problems(self.mode, self.key, self.create)) if self.mode in MODES else []
        yield from wrong
        yield from size_problems(self.roll_bytes, "roll_bytes")
        if type_ is not UNKNOWN:
            try:
                self.columns(type_)
            except shape.UnsupportedType as error:
                yield str(error)
            else:
                yield from row_problems(type_, self.mode, self.key_columns) if not wrong else ()

    def columns(self, type_: Any) -> tuple[Column, ...]:
        """The columns of the rows, for records of the type."""
        return columns_of(row_type(type_, self.mode))

    @property
    @abstractmethod
    def address(self) -> str:
        """The address of its files, as far as the description has it; empty: another names it."""

    def grants(self, user: str, type_: Any, *, creates: bool) -> Grants | None:
        """See `Sink`: rights on files in S3; a catalog has rights of its own."""
        if not self.address.startswith("s3://"):
            return None
        return s3_grants(self.address, user, on_objects=S3_ON_OBJECTS, on_bucket=S3_ON_BUCKET)

    @abstractmethod
    def _open_lake(self, context: CommitterContext) -> tuple[Lake, str]:
        """The table for a committer, and the place of its ledger: see `Committer.ledger`."""

    @abstractmethod
    def _open_files(self, context: WriterContext) -> tuple[StagedFiles, SinkEncoder]:
        """The files of a writer, and its encoder; the table is loaded, for its columns and partitions."""

    def open_committer(self, context: CommitterContext) -> Committer:
        lake, ledger = self._open_lake(context)
        return LakeCommitter(context, lake, self.kind, ledger)

    def open_writer(self, context: WriterContext) -> Opened:
        files, rows = self._open_files(context)
        from exactlyonce.sinks.lake.writer import LakeWriter  # pyarrow comes with the library

        roll_bytes = byte_count(self.roll_bytes)
        return Opened(LakeWriter(context.sink, context.subtask, self.kind, files, roll_bytes, context.note), rows)

    def _needing_library(self) -> AbstractContextManager[None]:
        """Around imports of what needs the library: descriptions do without."""
        return needing(self.kind, self.library, f"{type(self).__name__}({self.full_name!r})")


def refers(value: str) -> bool:
    """Whether a property's value is a reference to a secret; ``file://`` begins an address.

    >>> refers("file:/run/secrets/uri"), refers("file:///data/lake")
    (True, False)
    """
    return is_reference(value) and not value.startswith("file://")


def property_problems(argument: str, properties: Mapping[str, str]) -> Iterator[str]:
    """The problems of *properties*, an argument for the library below; no secret is shown."""
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str):
            yield f"{argument}[{name!r}] must be text"
        elif problem := reference_problem(value):
            yield f"{argument}[{name!r}]={value!r}: {problem}"
        elif not refers(value) and (_SECRET.search(name) or _SECRET.search(value)):
            yield f"{argument}[{name!r}] has a secret written out: put it into a variable, 'env:NAME', or into a file"


def sink_name(context: WriterContext | CommitterContext) -> str:
    """The name of a sink's folder of staged files; no name of a pipeline or sink has a dot in it."""
    return f"{context.pipeline}.{context.sink}"


def writer_id(context: WriterContext) -> WriterId:
    """A new writer, in the names of its files."""
    return WriterId(context.incarnation, context.attempt, context.subtask, secrets.token_hex(8))


_Change = tuple[SinkLedger, Sequence[StoreCommittable]]
"""A ledger, and the committables that it has more than the one before."""


@dataclass
class LakeCommitter:
    """See the module, and `Committer`."""

    context: CommitterContext
    lake: Lake
    kind: str
    ledger: str

    def check(self) -> None:
        self.lake.check()

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Committer`. It is a commit of the table, which every commit of an older incarnation conflicts with."""
        pipeline, sink = self.context.pipeline, self.context.sink
        ledger, _ = self._changed(lambda ledger: (ledger.fenced(pipeline, sink, incarnation, origin), ()))
        return ledger.checkpoints

    def commit(self, committables: Sequence[StoreCommittable], incarnation: int, origin: str) -> bool:
        """See `Committer`."""
        due: list[StoreCommittable] = []

        def change(ledger: SinkLedger) -> _Change:
            due.clear()
            for committable in committables:
                entry = LedgerEntry.of(self.context.pipeline, self.context.sink, committable, incarnation, origin)
                if (after := ledger.applied(entry)) is not None:
                    ledger = after
                    due.append(committable)
            return ledger, due

        _, table = self._changed(change)
        try:
            table.forget([committable.body for committable in committables if committable.records])
        except StoreError as error:  # given up as lost, a later sweep would remove files of the table
            raise StoreUnavailable(
                f"{error} The output is in the table, and nothing of it is lost; what was set aside for it must be "
                f"removed."
            ) from error
        return bool(due)

    def _changed(self, change: Callable[[SinkLedger], _Change]) -> tuple[SinkLedger, LoadedTable]:
        """The ledger after *change*, committed unless it is the same, and the table as it was before."""
        for _ in range(ATTEMPTS_MAX):
            table = self.lake.load()
            before = table.ledger
            after, committables = change(before)
            if after == before:
                return after, table
            staged = [committable.body for committable in committables if committable.records]
            try:
                table.commit(after, staged, max((one.checkpoint for one in committables), default=0))
            except Conflict:
                continue
            except StoreError:  # a commit of the same removes what was set aside, once it is done
                if self.lake.load().ledger == before:
                    raise
                continue
            return after, table
        raise StoreUnavailable(
            f"Other writers of the table were faster {ATTEMPTS_MAX} times in a row. Let them commit less often. "
            f"{ASKED_AGAIN}"
        )

    def clean(self, incarnation: int, attempt: int) -> None:
        """See `Committer`. No commit will name what is removed, as for the files of a `FileSink`."""
        table = self.lake.load()
        if table.ledger.incarnation <= incarnation:
            table.sweep(incarnation, attempt)

    def look(self) -> StoreView:
        """See `Inspectable`."""
        try:
            self.lake.inspect()
            problem = ""
        except (StoreError, ConfigError) as error:
            problem = str(error)
        try:
            table = self.lake.load()
        except StoreError as error:
            return StoreView(problem=problem or str(error))
        return StoreView.of(table.ledger, problem=problem, growth=table.growth)

    def close(self) -> None:
        self.lake.close()

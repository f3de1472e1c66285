"""The common part of the descriptions of lake sinks."""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from exactlyonce.pipeline import shape
from exactlyonce.pipeline.grants import Grants, s3_grants
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.secrets import is_reference, reference_problem
from exactlyonce.pipeline.sink import Sink
from exactlyonce.pipeline.sizes import Size, size_problems
from exactlyonce.sinks.committer import CommitterContext
from exactlyonce.sinks.files.columns import columns_of
from exactlyonce.sinks.files.layout import WriterId
from exactlyonce.sinks.sql.table import description_problems, row_problems
from exactlyonce.sinks.writer import WriterContext

T = TypeVar("T")
MODES = ("append", "upsert")
S3_ON_OBJECTS, S3_ON_BUCKET = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"), ("s3:ListBucket",)
"""The rights that a table in S3 needs."""
_SECRET = re.compile(r"token$|credential|password|secret|access.?key|account.?key|sas|://[^/@]*:[^@]*@", re.IGNORECASE)


class LakeSink(Sink[T]):
    """A sink whose rows are in files until their checkpoint is decided; it is exactly once alone."""

    mode: str
    key: tuple[str, ...]
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
                columns_of(type_)
            except shape.UnsupportedType as error:
                yield str(error)
            else:
                yield from row_problems(type_, self.key) if not wrong else ()

    @property
    def shown(self) -> str:
        """Table, mode and key: ``shop.totals upsert by customer``."""
        by = f" by {', '.join(self.key)}" if self.key else ""
        return f"{self.place} {self.mode}{by}"

    @property
    @abstractmethod
    def place(self) -> str:
        """The table's name or path."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address of its files, as far as the description has it; empty: another names it."""

    def grants(self, user: str, type_: Any, *, creates: bool) -> Grants | None:
        """See `Sink`: those of files in S3; a catalog has rights of its own."""
        if not self.address.startswith("s3://"):
            return None
        return s3_grants(self.address, user, on_objects=S3_ON_OBJECTS, on_bucket=S3_ON_BUCKET)


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

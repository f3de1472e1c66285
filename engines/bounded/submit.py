"""The seam to the runner of units: a `Submit` takes the encoded work of one stage, and answers for each, in order.

Invariants: all work ran to its end in at least one attempt, which gives the answer; an error that no retry would fix
comes back as an answer, so that nobody repeats it, and is raised here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines.bounded.unit.assembly import run_unit
from exactlyonce.engines.bounded.unit.comparison import compare_lane
from exactlyonce.engines.bounded.unit.kept import KEPT
from exactlyonce.engines.bounded.unit.lane_audit import audit_lane
from exactlyonce.engines.bounded.unit.messages import UnitFailure
from exactlyonce.engines.bounded.unit.outgoing import publish
from exactlyonce.engines.bounded.unit.visible_lanes import read_partition
from exactlyonce.engines.runtime.faults import users_traceback
from exactlyonce.pipeline.errors import ExactlyOnceError, UsersTraceback, class_name, is_fatal, made_from

Submit = Callable[[str, Sequence[bytes]], list[bytes]]
"""(description of the stage, encoded work) -> encoded answers in the same order; raises what ended the stage.

A description names pipeline, checkpoint and stage: "orders: checkpoint 12, stage totals".
"""
UnitsDone = Callable[[str, int, int], None]
"""(description of the stage, units done, units): told at its beginning, as units end, and at its end."""


class WorkListener(Protocol):
    """The listener to bounded work."""

    def note(self, text: str) -> None:
        """Show what a person should know."""

    def began(self, manifest: Manifest, offsets: int) -> None:
        """Work over so many offsets of input begins: from *manifest*, or recomputing up to it."""


class Executors(NamedTuple):
    """The place where units run."""

    submit: Submit
    staging: str | Path
    """A folder for files between stages, which all units and this process see, or a URL of HDFS or S3."""
    cores: Callable[[], int]
    """The number of units that run at the same time."""


_KINDS: dict[str, Callable[[bytes, str], bytes]] = {
    "unit": run_unit,
    "publication": publish,
    "comparison": compare_lane,
    "partition": read_partition,
    "lane": audit_lane,
}
TRIES = 4
"""The tries of a unit in this process, as many as Spark gives a task by default."""
_inline_number = itertools.count(1)


class _Tagged(msgspec.Struct):
    type: str


_tag_decoder = msgspec.msgpack.Decoder(_Tagged)
_failure_decoder = msgspec.msgpack.Decoder(UnitFailure)
_encode = msgspec.msgpack.Encoder().encode


def perform(work: bytes, attempt_label: str) -> bytes:
    """Do *work*; return the encoded answer, which is a `UnitFailure` where another attempt would fail as well."""
    try:
        return _KINDS[_tag_decoder.decode(work).type](work, attempt_label)
    except ExactlyOnceError as error:
        if not is_fatal(error):
            raise
        return _encode(failure_of(error))


def failure_of(error: ExactlyOnceError) -> UnitFailure:
    """*error* for another process."""
    return UnitFailure(class_name(error), str(error), {**error.facts}, users_traceback(error))


def error_of(failure: UnitFailure) -> ExactlyOnceError:
    """The error of another process, with the traceback of the user's exception as its cause."""
    error = made_from(failure.error, failure.text, failure.facts)
    error.__cause__ = UsersTraceback(failure.users_traceback) if failure.users_traceback else None
    return error


def in_process(stage: str, work: Sequence[bytes]) -> list[bytes]:
    """A `Submit` that runs everything here, one after the other."""
    with closing(KEPT):  # units of a stage share it, and the process may live on
        return in_process_keeping(stage, work)


def in_process_keeping(stage: str, work: Sequence[bytes]) -> list[bytes]:
    """The same for much small work: its caller closes `KEPT` at the end."""
    return settled(map(_persistently, work))


def _persistently(work: bytes) -> bytes:
    """The answer to *work*, which is tried again while another attempt may succeed."""
    number = next(_inline_number)
    for tries_before in range(TRIES - 1):
        with suppress(ExactlyOnceError):
            return perform(work, f"inline-{number}-{tries_before}")
    return perform(work, f"inline-{number}-{TRIES - 1}")


def settled(answers: Iterable[bytes]) -> list[bytes]:
    """*answers*; the first failure among them is raised."""
    receipts = []
    for answer in answers:
        try:
            failure = _failure_decoder.decode(answer)
        except msgspec.ValidationError:
            receipts.append(answer)
        else:
            raise error_of(failure)
    return receipts

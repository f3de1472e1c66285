"""The seam to whoever runs units: a `Submit` takes the encoded work of one stage, and answers for each, in order.

Invariants: every piece of work ran to its end in at least one attempt, and the answer is that attempt's; an error that
no further attempt would fix comes back as an answer, so that nobody repeats it, and is raised here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from exactlyonce.engines.bounded.unit.messages import Failure, tries_before
from exactlyonce.engines.bounded.unit.publish import publish
from exactlyonce.engines.bounded.unit.unit import run_unit
from exactlyonce.engines.bounded.workplace import THIS_MACHINE
from exactlyonce.pipeline.errors import ExactlyOnceError, class_name, is_fatal, made_from

Submit = Callable[[str, Sequence[bytes]], list[bytes]]
"""(name of the stage, encoded work) -> encoded answers in the same order; raises what ended the stage."""


class Executors(NamedTuple):
    """Where units run."""

    submit: Submit
    staging: Path
    """A folder that all of them and this process see: stages leave files for each other there."""
    cores: Callable[[], int]
    """How many units run at the same time."""


_KINDS: dict[str, Callable[[bytes, str], bytes]] = {"unit": run_unit, "publication": publish}
_inline_number = itertools.count(1)


class _Tagged(msgspec.Struct):
    type: str


_tag_decoder = msgspec.msgpack.Decoder(_Tagged)
_failure_decoder = msgspec.msgpack.Decoder(Failure)
_encode = msgspec.msgpack.Encoder().encode


def perform(work: bytes, attempt_label: str) -> bytes:
    """Do *work*, whatever it is: the encoded answer, which is a `Failure` where another attempt would fail as well."""
    try:
        return _KINDS[_tag_decoder.decode(work).type](work, attempt_label)
    except ExactlyOnceError as error:
        if not is_fatal(error):
            raise
        return _encode(Failure(class_name(error), str(error), {**error.facts}))


def in_process(stage: str, work: Sequence[bytes]) -> list[bytes]:
    """A `Submit` that runs everything here, one after the other."""
    return settled(perform(each, f"inline-{next(_inline_number)}-0") for each in work)


def in_this_process(staging: Path = THIS_MACHINE) -> Executors:
    """No executors at all: `in_process`."""
    return Executors(in_process, staging, lambda: 1)


def is_retry(attempt_label: str) -> bool:
    """Whether an attempt was not the first of its work."""
    return tries_before(attempt_label) > 0


def settled(answers: Iterable[bytes]) -> list[bytes]:
    """*answers*, none of which is a failure; the first that is one is raised."""
    found = []
    for answer in answers:
        if failure := _failure(answer):
            raise failure
        found.append(answer)
    return found


def _failure(answer: bytes) -> ExactlyOnceError | None:
    try:
        failure = _failure_decoder.decode(answer)
    except msgspec.ValidationError:
        return None
    return made_from(failure.error, failure.text, failure.facts)

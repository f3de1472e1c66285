"""The end of a run that has output left to write: clean only if every worker has said that it wrote all."""

from __future__ import annotations

import pytest
from test_whereabouts import progress

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.local.messages import AllWritten, Progress, Ready, WorkerFailed
from exactlyonce.engines.local.workers import LastOutput
from exactlyonce.pipeline.delivery import Delivery
from exactlyonce.pipeline.errors import ExactlyOnceError, OutputLost, RecordError
from exactlyonce.sinks import KafkaSink


def last_output(*said: object, delivery: Delivery = "at_most_once") -> ExactlyOnceError | None:
    """What a run ends with whose two workers have said that."""
    pipeline = Pipeline("counts")
    pipeline.source("in", KafkaSource("in", value=str)).sink("out", KafkaSink("out", delivery=delivery))
    output = LastOutput(pipeline.build())
    for message in (Ready(0, "", 1), Ready(1, "", 1), *said):
        output.heard(message)
    return output.error(7, lambda text: text.replace("hidden", "***"))


def waiting(subtask: int, count: int) -> Progress:
    """A worker that has so many records left."""
    told = progress(subtask)
    told.unwritten = {"out": count} if count else {}
    return told


def test_who_has_written_all_ends_cleanly() -> None:
    assert last_output(waiting(0, 3), AllWritten(0), AllWritten(1)) is None
    assert last_output(AllWritten(0), AllWritten(1), WorkerFailed(1, "", "close() raised")) is None


def test_what_failed_is_counted() -> None:
    """Of all workers that have not written theirs, with the reason; the class of an error that comes again is kept."""
    said = r"Output is lost.* last checkpoint, 7.*: 1,005 of sink 'out'\..*The reason: no room, \*\*\*"
    failed = WorkerFailed(0, "", "no room, hidden", {"out": 5})
    with pytest.raises(OutputLost, match=said):
        raise last_output(failed, waiting(1, 1000)) or AssertionError
    with pytest.raises(RecordError, match=r"Output is lost.*: 5 of sink 'out'.*too large"):
        raise last_output(AllWritten(1), WorkerFailed(0, "RecordError", "too large", {"out": 5})) or AssertionError


def test_who_says_nothing_more_is_no_clean_end() -> None:
    """A worker that was killed, or took too long, had perhaps not heard that it may write."""
    with pytest.raises(OutputLost, match=r"nobody knows how many, of 'out'.*was killed, or did not end in time"):
        raise last_output(AllWritten(0)) or AssertionError


def test_where_nothing_waits_nothing_is_lost() -> None:
    """The other deliveries have written before the checkpoint: there only an error that comes again is one."""
    assert last_output(delivery="exactly_once") is None
    assert last_output(WorkerFailed(0, "", "close() raised"), delivery="at_least_once") is None
    failed = last_output(WorkerFailed(0, "RecordError", "bad"), delivery="exactly_once")
    assert (type(failed), str(failed)) == (RecordError, "bad")

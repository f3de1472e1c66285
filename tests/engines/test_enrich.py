"""`enrich` on its own: batches, order, retries, timeouts, failures, and the log that a replay reads."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import closing, suppress
from typing import Any

import pytest
from enrich_pipelines import numbers
from running import visible

from exactlyonce import DeadLetters, Enriched, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.runtime import enriching
from exactlyonce.engines.runtime.batch import Batch, Coordinates
from exactlyonce.engines.runtime.enriching import Enricher, Service
from exactlyonce.engines.runtime.faults import DeadLetterOutput, Notes
from exactlyonce.engines.runtime.order_log import (
    BODY_SIZE_MAX,
    PART_SIZE_MAX,
    AnswerCodec,
    Answers,
    FetchFailed,
    OrderRuns,
    answers_in,
    runs_of,
)
from exactlyonce.errors import RecordError, Unavailable
from exactlyonce.pipeline.enrich import Calls
from exactlyonce.pipeline.errors import ExactlyOnceError, GraphError, Halt
from exactlyonce.pipeline.retries import Pauses
from exactlyonce.pipeline.running import RestartSettings
from exactlyonce.sinks import KafkaSink
from exactlyonce.testing.cluster import KafkaCluster


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enriching, "OF_SERVICE", Pauses(1, 5_000))


def batch_of(*records: Any) -> Batch:
    return Batch([*records], [Coordinates("in", 0, offset) for offset in range(len(records))])


def enriched(
    fetch: Callable[..., Any], *records: Any, answers: Answers | None = None, letters: list[Any] | None = None,
    answer: Any = int, batch: int = 2, in_flight: int = 4, timeout: str = "20s", retries: int = 2,
) -> list[tuple[Any, Any]]:  # fmt: skip
    """The records with their answers; dead letters go to *letters*."""
    given: list[Batch] = []
    dead = None
    if letters is not None:
        dead = DeadLetterOutput("p", "ask", "operator", Notes())
        dead.listeners.append(lambda batch: letters.extend(batch.records))
    answers = answers or Answers()
    with closing(Service(fetch)) as service:
        calls = Calls(answer, batch, in_flight, timeout, retries)
        operator = Enricher("ask", service, calls, AnswerCodec(answer), answers, dead_letters=dead)
        if answers.replayed is not None:
            operator.service = None
        operator.downstream.append(given.append)
        operator(batch_of(*records))
    return [(pair.record, pair.answer) for batch in given for pair in batch.records]


def test_answers_keep_the_order_of_records_and_calls_their_bounds() -> None:
    """The first calls end last, and no more than two are under way."""
    under_way, most = 0, 0

    async def fetch(records: list[int]) -> list[int]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        assert len(records) <= 2
        for _ in range(20 - records[0]):
            await asyncio.sleep(0)
        under_way -= 1
        return [record * 10 for record in records]

    assert enriched(fetch, *range(15)) == [(record, record * 10) for record in range(15)]
    assert (under_way, most) == (0, 2)


def test_a_call_is_made_again_after_errors_and_timeouts() -> None:
    calls: list[list[int]] = []

    async def fetch(records: list[int]) -> list[int]:
        calls.append(records)
        if calls.count(records) == 1:
            raise RuntimeError
        if calls.count(records) == 2:
            await asyncio.Event().wait()
        return records

    assert enriched(fetch, 1, 2, 3, timeout="50ms", batch=1, in_flight=3) == [(1, 1), (2, 2), (3, 3)]
    assert sorted(calls) == [[1]] * 3 + [[2]] * 3 + [[3]] * 3


def test_a_call_that_fails_is_halved_before_any_retry_and_side_by_side_within_in_flight() -> None:
    """Each call awaits a step of its own: what is halved one after the other would take as many steps as records."""
    letters: list[Any] = []
    calls: list[list[int]] = []
    under_way = most = steps = 0

    async def fetch(records: list[int]) -> list[int]:
        nonlocal under_way, most, steps
        under_way += len(records)
        most, steps = max(most, under_way), steps + (under_way == len(records))
        calls.append(records)
        for _ in range(5):
            await asyncio.sleep(0)
        under_way -= len(records)
        if 37 in records:
            raise ValueError("400 bad request")
        return records

    given = enriched(fetch, *range(100), letters=letters, batch=50, in_flight=60, retries=3)
    assert [record for record, _ in given] == [record for record in range(100) if record != 37]
    assert [letter.value for letter in letters] == [b"37"]
    assert calls.count([37]) == 4
    assert len(calls) <= 2 + 2 * 6 + 3, "two calls, two for each time that 50 are halved, and the retries"
    assert most <= 60
    calls.clear()
    steps = 0

    async def refuse(records: list[int]) -> list[int]:
        with suppress(ValueError):
            await fetch([*records, 37])
        raise ValueError("400 bad request")

    assert enriched(refuse, *range(64), letters=letters, batch=64, in_flight=128, retries=0) == []
    assert len(letters) == 1 + 64
    assert steps <= 8, "all of them fail in the steps that one of them takes"


def test_a_call_is_not_repeated_or_divided_once_a_barrier_may_wait_too_long() -> None:
    """It is an outage then, for which the job restarts. When restarts have not helped, what a record's own call says
    counts."""
    letters: list[Any] = []
    calls: list[list[int]] = []

    async def fetch(records: list[int]) -> list[int]:
        calls.append(records)
        raise ValueError("400 bad request")

    short = Answers(repeats_for_s=0)
    said = r"ValueError: 400 bad request.* on a call for 2 records, .* offset 0 is the first\. There was no time"
    with pytest.raises(Unavailable, match=said):
        enriched(fetch, 5, 6, letters=letters, answers=short)
    assert (calls, letters) == ([[5, 6]], [])
    short.asks_alone = True
    assert enriched(fetch, 5, 6, letters=letters, answers=short) == []
    assert (calls[1:], [letter.value for letter in letters]) == ([[5], [6]], [b"5", b"6"])


def test_an_outage_of_a_call_for_many_names_no_record_and_one_of_a_record_alone_names_it() -> None:
    async def fetch(records: list[int]) -> list[int]:
        if 7 in records or 8 in records:
            raise ConnectionResetError("gone")
        return records

    with pytest.raises(Unavailable, match=r"on a call for 4 records, of which .* offset 0 is the first") as raised:
        enriched(fetch, 5, 6, 7, 8, batch=4, in_flight=4)
    assert raised.value.facts == {"operator": "ask"}
    alone = Answers(asks_alone=True)
    said = r"offset 2\. .* 2 others of its batch got .* timeout=; .* --skip in:0:2"
    with pytest.raises(Unavailable, match=said) as raised:
        enriched(fetch, 5, 6, 7, 8, batch=4, in_flight=4, answers=alone)
    assert raised.value.facts["offset"] == 2
    with pytest.raises(Unavailable, match="no other record of its batch got an answer, either") as raised:
        enriched(fetch, 7, 8, batch=4, in_flight=4, answers=alone)
    assert "--skip" not in str(raised.value)


@pytest.mark.exhaustive
def test_a_run_finds_the_record_that_gets_no_answer_after_some_restarts(kafka: KafkaCluster, topic_name: str) -> None:
    """The first two restarts repeat the calls as they were; then each record is asked about alone."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.create_topic(f"{topic_name}-out")
    kafka.produce(f"{topic_name}-in", [(str(number), json.dumps(number)) for number in range(100)])
    notes: list[str] = []
    is_away = True

    async def fetch(records: list[int]) -> list[int]:
        if is_away and 37 in records:
            raise TimeoutError("no answer")
        return records

    pipeline = Pipeline(topic_name)
    numbers = pipeline.source("in", KafkaSource(f"{topic_name}-in", value=int))
    asked = numbers.enrich("ask", fetch, output=int, retries=0)
    asked.map(lambda pair: pair.answer, output=int).sink("out", KafkaSink(f"{topic_name}-out"))

    def run(restart: RestartSettings) -> None:
        pipeline.run(
            inline=True, until="latest", restart=restart, bootstrap_servers=kafka.bootstrap_servers,
            on_event=lambda event: notes.append(event.get("text", "")),
        )  # fmt: skip

    with pytest.raises(ExactlyOnceError, match=r"gives up: .* offset 37\. .* others of its batch got .* --skip"):
        run({"strategy": "fixed_delay", "attempts": 2, "delay": "10ms"})
    restarts = [note for note in notes if "restarting from" in note]
    assert len(restarts) == 2
    assert all("on a call for 50 records, of which" in note for note in restarts)
    is_away = False
    run({"strategy": "none"})
    assert len(visible(kafka, f"{topic_name}-out", 100)) == 100


def test_an_outage_is_no_dead_letter_and_ends_the_other_calls() -> None:
    """A timeout and another OSError restart the job, whatever `on_error` says."""
    letters: list[Any] = []
    ended = threading.Event()

    async def fetch(records: list[int]) -> list[int]:
        if 1 in records:
            raise ConnectionRefusedError("not there")
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return records

    with pytest.raises(Unavailable, match=r"ConnectionRefusedError: not there.*record at in\[0\] offset 1"):
        enriched(fetch, 5, 1, 6, 7, letters=letters, batch=1, in_flight=4)
    assert ended.is_set()
    with pytest.raises(Unavailable, match="TimeoutError: no answer within 20ms"):
        enriched(fetch, 5, letters=letters, timeout="20ms", retries=0)
    assert letters == []


def test_a_record_that_fails_alone_stops_the_job_or_is_a_dead_letter() -> None:
    async def fetch(records: list[int]) -> list[int]:
        if 3 in records:
            raise ValueError("no 3")
        return records

    with pytest.raises(RecordError, match=r"'ask' raised ValueError: no 3.*offset 2.*--skip in:0:2"):
        enriched(fetch, 1, 2, 3, 4)
    letters: list[Any] = []
    answers = Answers()
    given = enriched(fetch, 1, 2, 3, 4, letters=letters, answers=answers)
    assert given == [(1, 1), (2, 2), (4, 4)]
    (letter,) = letters
    headers = dict(letter.headers)
    assert headers["dead-letter.error"] == b"ValueError"
    assert re.fullmatch(rb"no 3 \(test_enrich\.py:\d+ in fetch\)", headers["dead-letter.message"] or b"")
    again: list[Any] = []
    replayed = Answers()
    replayed.replay(OrderRuns().cut(answers=answers.cut()))
    assert enriched(fetch, 1, 2, 3, 4, letters=again, answers=replayed) == given
    assert again == letters, "a replay gives the same letter"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda records: records[1:], "returned 1 answers for 2 records"),
        (lambda records: None, "returned None, which is no list"),
        (lambda records: "12", "returned '12', which is no list"),
        (lambda records: {*records}, r"returned \{1, 2\}, which is no list"),
        (lambda records: dict.fromkeys(records, 0), r"returned \{1: 0, 2: 0\}, which is no list"),
        (lambda records: ["one", "two"], "no int, or cannot be kept as one: Expected `int`, got `str`"),
        (lambda records: [1, object()], "cannot be kept as one: Encoding objects of type object.*offset 1"),
        (lambda records: [1, "x" * BODY_SIZE_MAX], "the order log has room for.*offset 1"),
    ],
)
def test_wrong_answers_stop_the_job_at_once(answer: Any, problem: str) -> None:
    calls = 0

    async def fetch(records: list[int]) -> Any:
        nonlocal calls
        calls += 1
        return answer(records)

    with pytest.raises(RecordError, match=problem):
        enriched(fetch, 1, 2, letters=[])
    assert calls == 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_an_exit_or_cancelling_of_the_function_is_an_error_of_its_record(error: type[BaseException]) -> None:
    """An exit ends no event loop: all would wait for it without end."""

    async def fetch(records: list[int]) -> list[int]:
        if 2 in records:
            raise error("enough")
        return records

    with pytest.raises(RecordError, match=rf"'ask' raised {error.__name__}: enough .* offset 1\."):
        enriched(fetch, 1, 2, 3, letters=[])

    class Client:
        async def open(self, context: Any) -> None:
            raise error("enough")

    with closing(Service(Client())) as service, pytest.raises((error, futures.CancelledError)):
        service.open(None)


def test_a_replay_takes_the_logged_answers_whatever_its_batches() -> None:
    answers, names = Answers(), iter("abcdefgh")

    async def fetch(records: list[int]) -> list[str]:
        return [next(names) for _ in records]

    given = enriched(fetch, 1, 2, 3, answers=answers, answer=str)
    given += enriched(fetch, 4, 5, answers=answers, answer=str)
    order = OrderRuns()
    order.note("in", 0, 5)
    logs = order.cut(answers=answers.cut())
    assert [count for _, count in runs_of(logs)] == [5]
    replayed = Answers()
    replayed.replay(logs)
    again = enriched(fetch, 1, answers=replayed, answer=str)
    with pytest.raises(Halt, match="answers for more records than come"):
        replayed.require_taken()
    again += enriched(fetch, 2, 3, 4, 5, answers=replayed, answer=str)
    assert again == given
    replayed.require_taken()
    with pytest.raises(Halt, match="has 0 answers where 1 records come"):
        enriched(fetch, 6, answers=replayed, answer=str)
    assert next(names) == "f", "no call was made"


def test_answers_of_any_size_and_failures_are_kept_in_parts_that_fit_a_block() -> None:
    def told(answer: Any) -> Any:
        return (answer.name, str(answer)) if isinstance(answer, FetchFailed) else answer

    codec = AnswerCodec(str | None)
    answers = [FetchFailed("E", "x: y"), *("y" * 200_000 for _ in range(7)), None, FetchFailed("E", "")]
    bodies = [*codec.encode(answers)]
    parts = OrderRuns().cut(answers=[(id, body) for body in bodies for id in ("b", "a")])
    assert max(map(len, parts)) <= PART_SIZE_MAX
    for operator in ("a", "b"):
        read = [answer for id, body in answers_in(parts) if id == operator for answer in codec.decode(body)]
        assert [*map(told, read)] == [*map(told, answers)]
    assert [*answers_in(OrderRuns().cut(exact=False, answers=[("a", bodies[0])]))] == []


def test_functions_open_and_close_in_the_loop_that_calls_them() -> None:
    loops: list[Any] = []

    class Client:
        async def open(self, context: Any) -> None:
            loops.append(asyncio.get_running_loop())

        async def __call__(self, records: list[int]) -> list[int]:
            loops.append(asyncio.get_running_loop())
            return records

        async def close(self) -> None:
            loops.append(asyncio.get_running_loop())

    service = Service(Client())
    with closing(service):
        service.open(None)
        service.start(lambda: service.function([1])).result()
    assert len(loops) == 3
    assert len({*loops}) == 1


async def untyped(records: list[int]):  # type: ignore[no-untyped-def]  # the mistake
    return records


def plain(records: list[int]) -> list[int]:
    return records


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda s: s.enrich("ask", plain), "plain is not async: write it as async def plain"),
        (lambda s: s.enrich("ask", untyped), "the type of the answers is unknown"),
        (lambda s: s.enrich("ask", untyped, output=threading.Event), "the answers are kept in checkpoints, and"),
        (lambda s: s.enrich("ask", numbers, batch=0), "batch=0 must be 1 record or more"),
        (lambda s: s.enrich("ask", numbers, batch=9, in_flight=8), "in_flight=8 must be 9 or more"),
        (lambda s: s.enrich("ask", numbers, retries=-1), "retries=-1 must be 0 or more"),
        (lambda s: s.enrich("ask", numbers, timeout="0s"), "timeout= must be above 0"),
        (lambda s: s.enrich("ask", numbers, timeout="soon"), "timeout is 'soon'"),
    ],
)
def test_mistakes_are_named_when_the_pipeline_is_built(build: Any, problem: str) -> None:
    pipeline = Pipeline("p")
    build(pipeline.source("in", KafkaSource("in", value=int))).sink("out", KafkaSink("out"))
    with pytest.raises(GraphError, match=problem):
        pipeline.build()


def test_explain_shows_the_calls() -> None:
    pipeline = Pipeline("p")
    asked = pipeline.source("in", KafkaSource("in", value=int)).enrich(
        "ask", untyped, output=str, on_error=DeadLetters("dead")
    )
    asked.sink("out", KafkaSink("out"))
    graph = pipeline.build()
    assert graph.node("ask").type == Enriched[int, str]
    assert "calls of 50, 200 in flight, timeout 5s, retries 3" in graph.explain()

"""Dead letters: each record that cannot be processed is written once with its reason, the others as if it were not."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer
from running import Job, exactlyonce, visible
from waiting import until

from exactlyonce import Count, DeadLetters, EventTime, Output, Pipeline, Tumbling
from exactlyonce.connectors import KafkaSource
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.letters import REPLAYED, LetterEndings, Letters
from exactlyonce.engines.runtime.activity import CHUNK_RECORDS
from exactlyonce.engines.runtime.assembler import inputs_at_hand
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates, coordinates_of, origins_of
from exactlyonce.engines.runtime.faults import TEXT_LENGTH_MAX, DeadLetterOutput, Notes, record_error
from exactlyonce.engines.runtime.operators import (
    BatchOperator,
    Filter,
    FlatMap,
    KeyBy,
    Map,
    SinkOutput,
    Split,
    Stateful,
    listeners,
)
from exactlyonce.pipeline.dead_letters import PREFIX, DeadLetterLimits, Reason, as_input
from exactlyonce.pipeline.errors import Fenced, GraphError, Unavailable
from exactlyonce.pipeline.event_time import shown_time
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.records import Record
from exactlyonce.sinks import KafkaSink
from exactlyonce.state.hash_map import KeyedTable
from exactlyonce.state.state_type import StateType
from exactlyonce.state.stored import StoredState
from exactlyonce.testing.cluster import LIMIT_S, Committed, KafkaCluster

BAD = b'{"id": 7, "customer": 12, "total": 1}'
RECORD = 3


# --- operators -------------------------------------------------------------------------------------------------------


class Tally(msgspec.Struct):
    seen: list[int]


def fail_on_threes(number: int) -> int:
    if number % 3 == 0:
        raise ValueError(f"{number} is a multiple of 3")
    return number


def table(type_: Any) -> KeyedTable[Any]:
    return KeyedTable(StoredState(operator="op", type=type_, groups=range(16), max_parallelism=16))


def tallied(state: Tally | None, number: int) -> tuple[Tally, int]:
    state = state or Tally([])
    state.seen.append(number)  # changed in place, then failed
    return state, fail_on_threes(number)


def told(state: int | None, number: int, emit: Callable[..., None]) -> tuple[int, int]:
    emit(number, Output("side", int))
    return (state or 0) + 1, fail_on_threes(number)


def emitting(number: int, emit: Callable[..., None]) -> None:
    emit(number)
    fail_on_threes(number)


def reduced(before: int, number: int) -> int:
    fail_on_threes(number)
    return before + number


class Collected:
    def __init__(self) -> None:
        self.written: list[Any] = []

    def write(self, outputs: Any) -> None:
        self.written += map(int, outputs.values)


OPERATORS: dict[str, Callable[[], BatchOperator]] = {
    "map": lambda: Map("op", fail_on_threes),
    "filter": lambda: Filter("op", lambda number: fail_on_threes(number) > 0),
    "flat_map": lambda: FlatMap("op", lambda number: (fail_on_threes(each) for each in (number,))),
    "key_by": lambda: KeyBy("op", fail_on_threes),
    "split": lambda: Split("op", emitting),
    "stateful_map": lambda: Stateful("op", tallied, table(Tally), clone=StateType[Any]("op", Tally).clone),
    "stateful_flat_map": lambda: Stateful("op", lambda s, n: (n, [fail_on_threes(n)]), table(int), flat=True),
    "with side outputs": lambda: Stateful("op", told, table(int), sides={"side": []}),
}


def run(operator: BatchOperator, numbers: list[int]) -> tuple[list[int], list[Any]]:
    """The outputs, and the letters, of *numbers*, each of a key of its own."""
    outputs: list[int] = []
    letters: list[Any] = []
    operator.downstream.append(lambda batch: outputs.extend(batch.records))
    operator.dead_letters = DeadLetterOutput("p", "op", "operator", Notes())
    operator.dead_letters.listeners.append(lambda batch: letters.extend(batch.records))
    operator(Batch(numbers, [Coordinates("t", 0, n) for n in numbers], [canonical_key(n) for n in numbers]))
    return outputs, letters


@pytest.mark.parametrize("kind", OPERATORS)
def test_each_operator_goes_on_without_the_records_that_fail(kind: str) -> None:
    numbers = list(range(1, 2 * CHUNK_RECORDS))
    operator = OPERATORS[kind]()
    side: list[int] = []
    if kind == "with side outputs":
        listeners(operator, "side").append(lambda batch: side.extend(batch.records))
    outputs, letters = run(operator, numbers)
    good, bad = ([n for n in numbers if bool(n % 3) is whole] for whole in (True, False))
    assert outputs == good
    assert [int(letter.value) for letter in letters] == bad
    reasons = [Reason.of(letter.headers) for letter in letters]
    assert [reason.offset for reason in reasons if reason] == bad
    assert reasons[0] is not None
    assert (reasons[0].error, reasons[0].message) == ("ValueError", "3 is a multiple of 3")
    assert reasons[0].traceback.endswith('in fail_on_threes: raise ValueError(f"{number} is a multiple of 3")')
    assert str(Path(__file__).parent) not in reasons[0].traceback
    assert side == (good if kind == "with side outputs" else [])


def test_a_state_that_was_changed_in_place_is_as_before() -> None:
    operator = OPERATORS["stateful_map"]()
    assert isinstance(operator, Stateful)
    numbers = [1, 3, 2, 6, 4]
    operator.dead_letters = DeadLetterOutput("p", "op", "operator", Notes())
    operator(Batch(numbers, [Coordinates("t", 0, n) for n in numbers], [canonical_key("ann")] * len(numbers)))
    assert operator.table.get(canonical_key("ann")) == Tally([1, 2, 4])


def test_a_reduction_goes_on_from_the_last_good_record() -> None:
    operator = Stateful("op", reduced, table(int), reduces=True)
    outputs: list[int] = []
    operator.downstream.append(lambda batch: outputs.extend(batch.records))
    operator.dead_letters = DeadLetterOutput("p", "op", "operator", Notes())
    numbers = [3, 1, 6, 2]  # the first of a key is its state: no function runs
    operator(Batch(numbers, [Coordinates("t", 0, n) for n in numbers], [canonical_key("ann")] * len(numbers)))
    assert outputs == [3, 4, 6]
    assert operator.table.get(canonical_key("ann")) == 6


def test_a_sink_writes_what_can_be_encoded() -> None:
    written = Collected()
    encoder = KafkaSink[int]("out", key=lambda number: str(fail_on_threes(number))).encoder(int)
    _, letters = run(SinkOutput("op", written.write, encoder), [1, 2, 3, 4, 6])
    assert written.written == [1, 2, 4]
    assert [int(letter.value) for letter in letters] == [3, 6]


@pytest.mark.parametrize(
    ("raised", "error"), [(ConnectionError("away"), Unavailable), (Unavailable("away"), Unavailable)], ids=repr
)
@pytest.mark.parametrize("kind", ["map", "split", "stateful_flat_map"])
def test_an_outage_makes_no_letter(kind: str, raised: Exception, error: type[Exception]) -> None:
    def fail(*given: Any) -> Any:
        raise raised

    operator = OPERATORS[kind]()
    operator.fn = fail  # type: ignore[attr-defined]  # each of these has one
    with pytest.raises(error):
        run(operator, [1])


def test_a_letter_depends_on_the_record_alone() -> None:
    """Addresses of objects and folders of files differ between processes, sets have no order; long texts are cut."""
    output = DeadLetterOutput("p", "op", "operator", Notes())
    place = Coordinates("t", 0, 1)
    texts = [
        Reason.of(output.letter({"b", "a"}, place, ValueError(f"{object()} {'x' * 9_999}")).headers) for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert texts[0] is not None
    assert "0x..." in texts[0].message
    assert len(texts[0].message) <= TEXT_LENGTH_MAX + 3
    assert output.letter({"b", "a"}, place, ValueError()).value == b'["a","b"]'


MODULE = """
from exactlyonce import DeadLetters, EventTime, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


def at(order: dict) -> int:
    return order["at"]


def timed(name: str) -> Pipeline:
    pipeline = Pipeline(name)
    source = KafkaSource(f"{name}-in", value=dict, time=EventTime(at, on_error=DeadLetters(f"{name}-dead")))
    pipeline.source("orders", source).sink("out", KafkaSink(f"{name}-out"))
    return pipeline
"""


@pytest.mark.exhaustive
def test_an_audit_computes_the_letters_again_from_another_folder_and_other_lines(
    job_of: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, lines in (("here", ""), ("there", "\n\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "moved_timed.py").write_text(lines + MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    job = job_of("moved_timed:timed", partitions=1)
    job.feed(3)
    job.finish_here()
    ((_, reason), *_) = letters_in(job.kafka, f"{job.name}-dead", 3)
    assert reason.message == "time= raised KeyError: 'at'"
    monkeypatch.delitem(sys.modules, "moved_timed")
    words = ("audit", "moved_timed:timed", "--param", f"name={job.name}", "--on", "driver", "--json")
    report = json.loads(exactlyonce(job.kafka, *words, folder=tmp_path / "there"))
    assert (report["records_in"], report["findings"], report["unjudged"]) == (3, [], [])


def test_a_letter_of_a_result_by_time_has_no_place_in_a_topic() -> None:
    result = origins_of("counts", [5], [1_700_000_000_123])
    (sent,) = BatchCodec(int).decode(BatchCodec(int).encode(Batch([1], result))).origins
    (kept,) = map(Coordinates, *coordinates_of([sent]))  # as an operator with state holds them
    letter = DeadLetterOutput("p", "op", "operator", Notes()).letter(1, kept, ValueError())
    reason = Reason.of(letter.headers)
    assert reason is not None
    assert (reason.upstream, reason.time) == ("counts", "2023-11-14T22:13:20.123Z")
    assert {"topic", "partition", "offset"}.isdisjoint(name.removeprefix(PREFIX) for name, _ in letter.headers)
    stopped = record_error("Operator 'op'", "op", kept, ValueError())
    assert "on a result of operator 'counts' at 2023-11-14T22:13:20.123Z." in str(stopped)
    assert "--skip" not in str(stopped)
    assert stopped.facts == {"operator": "op"}
    again = DeadLetterOutput("q", "in", "source", Notes(), {"t": lambda _: letter})
    outer = Reason.of(again.undecoded(Coordinates("t", 2, 7), ValueError(), "no").headers)
    assert outer is not None
    assert (outer.topic, outer.partition, outer.offset, outer.upstream) == ("t", 2, 7, "")


@pytest.mark.exhaustive
def test_letters_behind_operators_by_time_name_the_record_or_the_result(
    job_of: Callable[..., Job], command: Callable[..., str]
) -> None:
    job = job_of("event_time_pipelines:lettered", partitions=1)
    job.kafka.produce(job.topic, [b'{"at": 100}', b'{"at": 1200}'])
    job.finish("--parallelism", "2", "--drain")
    found = letters_in(job.kafka, f"{job.name}-dead", 8)
    times = {
        "sorted": ("counts", [999, 1_999]),
        "pairs": ("pairs", [1_100, 2_200]),
        "reminders": ("reminders", [1_100, 2_200]),
    }
    wanted: list[Any] = [
        (f"{id}-refused", upstream, shown_time(time), None) for id, (upstream, some) in times.items() for time in some
    ]
    wanted += [("reminders-refused", "", "", offset) for offset in (0, 1)]
    letters = [(reason.operator, reason.upstream, reason.time, reason.offset) for _, reason in found]
    assert Counter(letters) == Counter(wanted)
    assert "sorted-refused     counts 1970-01-01T00:00:00.999Z" in command("list", f"{job.name}-dead")
    assert job.audited()["unjudged"] == []


@pytest.mark.parametrize(
    ("limits", "letters", "records", "exceeded"),
    [
        (DeadLetterLimits(), 1_000_000, 1_000_000, False),
        (DeadLetterLimits(per_checkpoint=2), 2, 10, False),
        (DeadLetterLimits(per_checkpoint=2), 3, 10, True),
        (DeadLetterLimits(per_checkpoint=0), 1, 10, True),
        (DeadLetterLimits(share=0.1), 10, 100, False),
        (DeadLetterLimits(share=0.1), 11, 100, True),
        (DeadLetterLimits(share=0.01), 1, 3, False),
        (DeadLetterLimits(share=0.01), 2, 3, True),
        (DeadLetterLimits(share=1), 3, 3, False),
    ],
)
def test_limits(limits: DeadLetterLimits, letters: int, records: int, exceeded: bool) -> None:
    assert bool(limits.exceeded(letters, records)) is exceeded


@pytest.mark.parametrize(
    ("on_error", "text"),
    [
        (DeadLetters("orders-dead", max_per_checkpoint=-1), "max_per_checkpoint=-1 must be"),
        (DeadLetters("orders-dead", max_share=3), "max_share=3 must be from 0 to 1"),
        (DeadLetters("no topic"), "topic 'no topic' must be"),
        ("skip", "on_error='skip' must be DeadLetters"),
    ],
)
def test_what_is_refused_as_the_pipeline_is_built(on_error: Any, text: str) -> None:
    pipeline = Pipeline("orders")
    orders = pipeline.source("orders", KafkaSource("orders", value=int))
    orders.map(str, id="text", output=str, on_error=on_error).sink("out", KafkaSink("out"))
    with pytest.raises(GraphError, match=text):
        pipeline.build()


def test_what_a_letter_holds() -> None:
    """The input record, unless a state has taken it, whatever the parallelism; and of a letter, only its own reason."""
    dead = DeadLetters("dead")
    pipeline = Pipeline("orders")
    source = pipeline.source("in", KafkaSource("in", value=int, on_error=dead))
    keyed = source.map(abs, id="early", output=int).key_by(lambda number: number, partitioned=True)
    kept = keyed.reduce("kept", max)
    kept.map(abs, id="late", output=int).sink("out", KafkaSink("out"))
    source.sink("copies", KafkaSink("copies"))
    graph = pipeline.build()
    holding = [id for id in ("in", "early", "kept", "late", "out", "copies") if inputs_at_hand(graph, graph.node(id))]
    assert holding == ["in", "early", "kept", "copies"]
    inner = DeadLetterOutput("p", "a", "source", Notes(), {"t": lambda _: Record(b"1", headers=(("h", b"1"),))})
    place = Coordinates("t", 0, 1)
    letter = inner.undecoded(place, ValueError("first"), "first")
    outer = DeadLetterOutput("q", "b", "source", Notes(), {"t": lambda _: letter})
    assert as_input(outer.undecoded(place, ValueError("second"), "second")) == letter
    assert as_input(letter).headers == (("h", b"1"),)


def test_where_letters_may_not_go() -> None:
    for topic, text in (("in", "which the pipeline reads"), ("out", "has the outputs of sink 'out'")):
        pipeline = Pipeline("orders")
        numbers = pipeline.source("numbers", KafkaSource("in", value=int, on_error=DeadLetters(topic)))
        numbers.sink("out", KafkaSink("out"))
        with pytest.raises(GraphError, match=text):
            pipeline.build()


# --- runs ------------------------------------------------------------------------------------------------------------


def expected(records: list[tuple[int, bytes]]) -> tuple[list[tuple[int, str, int]], Counter[tuple[str, int]]]:
    """The totals of `pipelines.lettered` over (offset, value) of one partition, and the letters by operator, offset."""
    sums, totals, letters = defaultdict[str, int](int), [], Counter[tuple[str, int]]()
    for offset, value in records:
        order = json.loads(value)
        if value == BAD:
            letters["orders", offset] += 1
        elif order["total"] % 5 == 0:
            letters["checked", offset] += 1
        elif order["total"] % 7 == 0:
            letters["totals", offset] += 1
        else:
            sums[order["customer"]] += order["total"]
            if order["id"] % 11 > 1:
                letters["out", offset] += 1
            else:
                totals.append((order["id"], order["customer"], sums[order["customer"]]))
    return totals, letters


def letters_in(kafka: KafkaCluster, topic: str, count: int) -> list[tuple[Committed, Reason]]:
    found = []
    for record in visible(kafka, topic, count):
        reason = Reason.of(record.headers)
        assert reason is not None
        found.append((record, reason))
    return found


def assert_lettered(job: Job, but: Collection[int] = ()) -> list[tuple[Committed, Reason]]:
    """The outputs and letters of everything fed to the one partition, *but* what is at these offsets."""
    given = job.kafka.read_committed(job.topic)
    fed = [(record.offset, record.value or b"") for record in given if record.offset not in but]
    totals, wanted = expected(fed)
    seen = [json.loads(record.value or b"") for record in visible(job.kafka, f"{job.name}-out", len(totals))]
    assert sorted((each["id"], each["customer"], each["sum"]) for each in seen) == sorted(totals)
    found = letters_in(job.kafka, f"{job.name}-dead", wanted.total() + len(but))
    letters = [letter for letter in found if letter[1].offset not in but]
    assert Counter((reason.operator, reason.offset) for _, reason in letters) == wanted
    assert all(reason.topic == f"{job.name}-in" for _, reason in letters)
    return letters


def test_every_record_is_written_once_or_is_a_letter_once_through_a_kill(
    job_of: Callable[..., Job], failpoint: Callable[..., dict[str, str]]
) -> None:
    job = job_of("lettered", "--parallelism", "2", "--num-retained", "100", partitions=1)  # the audit judges them all
    job.feed(300)
    job.kafka.produce(job.topic, [BAD] * 9)
    killed = job.start(env=failpoint("coordinator-decided"))
    job.feed(400)
    killed.wait()
    job.kafka.produce(job.topic, [BAD])
    last = job.finish("--parallelism", "1", "--inline")
    letters = assert_lettered(job)
    assert 1 <= last.events[-1]["dead_letters"] <= len(letters)
    given: dict[int | None, Committed] = {record.offset: record for record in job.kafka.read_committed(job.topic)}
    for letter, reason in letters:
        assert reason.can_return is (reason.operator in ("orders", "checked"))
        fed = given[reason.offset]
        if reason.can_return:
            assert (letter.key, letter.value) == (fed.key, fed.value)
        elif reason.operator == "totals":
            assert json.loads(letter.value or b"") == json.loads(fed.value or b"")
        else:
            assert json.loads(letter.value or b"").keys() == {"id", "customer", "sum"}
    message = next(reason.message for _, reason in letters if reason.operator == "totals")
    assert " for <object object at 0x...>" in message
    assert job.audited()["unjudged"] == []


@pytest.mark.exhaustive
def test_a_backfill_writes_the_same_letters(job_of: Callable[..., Job]) -> None:
    job = job_of("lettered", "--param", "max_per_checkpoint=200", partitions=1)
    job.feed(300)
    job.kafka.produce(job.topic, [BAD] * 9)
    words = ("--param", f"name={job.name}", "--param", "max_per_checkpoint=200", "--on", "driver")
    job.command("backfill", "pipelines:lettered", *words)
    letters = assert_lettered(job)
    job.kafka.produce(job.topic, [BAD] * 201)
    job.command("backfill", "pipelines:lettered", *words, code=RECORD)
    assert len(letters_in(job.kafka, f"{job.name}-dead", len(letters))) == len(letters)
    job.finish_here("--param", "max_per_checkpoint=201")
    assert_lettered(job)


def test_a_flood_stops_the_job_before_any_of_it_is_written(job_of: Callable[..., Job]) -> None:
    job = job_of("lettered", "--param", "max_per_checkpoint=20", partitions=1)
    job.feed(30)
    job.finish_here()
    before = len(assert_lettered(job))
    job.kafka.produce(job.topic, [BAD] * 21)
    said = job.finish_here(code=RECORD)
    assert "21 dead letters for sink 'orders-dead-letters', more than max_per_checkpoint=20" in said
    assert "dead letter: source 'orders'" in said
    assert len(job.kafka.read_committed(f"{job.name}-dead")) == before
    job.finish_here("--param", "max_per_checkpoint=21")
    assert_lettered(job)


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(kafka: KafkaCluster) -> Callable[..., str]:
    """`command("list", "--json")` is what `exactlyonce dead-letters` prints."""
    return partial(exactlyonce, kafka, "dead-letters")


def test_letters_are_shown_and_each_is_sent_back_once(
    job_of: Callable[..., Job], kafka: KafkaCluster, command: Callable[..., str]
) -> None:
    job = job_of("lettered", partitions=1)
    job.feed(40)
    kafka.produce(job.topic, [("k", b"\xff{")])
    job.finish_here()
    topic, letters = f"{job.name}-dead", assert_lettered(job, but={40})
    assert f"{len(letters) + 1} dead letters, {len(letters) + 1} open: " in command("list", topic)
    facts = [json.loads(line) for line in command("list", topic, "--operator", "orders", "--json").splitlines()]
    assert [(each["offset"], each["key"], each["value"]) for each in facts] == [(40, "k", {"base64": "/3s="})]
    assert "the value is not Order in json" in command("show", topic, facts[0]["place"])
    again = [reason.offset or 0 for _, reason in letters if reason.can_return] + [40]
    left = len(letters) + 1 - len(again)
    assert command("replay", topic).splitlines() == [
        f"{len(again)} records sent back to {job.topic}.",
        f"{left} dead letters left out: behind an operator with state or a loop they have no input record, and "
        "records of files and of tables came from no topic. docs/pipelines.md, dead letters, says what to do with "
        "them.",
    ]
    given = kafka.read_committed(job.topic)
    whole = [(record.key, record.value, record.headers, record.partition) for record in given]
    assert Counter(whole[41:]) == Counter(whole[offset] for offset in again)
    assert "has no such open dead letter" in command("replay", topic)
    shown = command("list", topic)
    assert f"{len(letters) + 1 - left} replayed" in shown
    assert f"{left} open" in shown
    assert len(kafka.read_committed(job.topic)) == len(given)
    assert "no dead letter at" in command("show", topic, "0:999", code=2)
    assert "is no place" in command("show", topic, "17", code=2)
    assert f"{job.name}-nowhere" in command("list", f"{job.name}-nowhere", code=2)


def written(kafka: KafkaCluster, name: str, values: list[bytes], *operators: str) -> None:
    """In NAME-dead, letters of records with *values* in NAME-in: of each, one by each of *operators*."""
    kafka.create_topic(f"{name}-in")
    kafka.create_topic(f"{name}-dead")
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for offset, value in enumerate(values):
        for operator in operators or ("orders",):
            reason = Reason(
                pipeline=name, operator=operator, kind="source", holds="input", topic=f"{name}-in",
                partition=0, offset=offset, error="ValueError", message=f"no. {offset}",
            )  # fmt: skip
            producer.produce(f"{name}-dead", value, "k", 0, headers=[("h", b"1"), *reason.headers()])
    assert not producer.flush(LIMIT_S)


def test_records_that_a_service_has_refused_are_sent_again_by_hand(
    kafka: KafkaCluster, topic_name: str, command: Callable[..., str]
) -> None:
    """Such a letter has no place in the input: a list shows none, and a replay says what to do instead."""
    topic = kafka.create_topic(f"{topic_name}-dead")
    reason = Reason(pipeline="shop", operator="hook", kind="sink", holds="record", error="HTTP 422", message="no.")
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    producer.produce(topic, b"{}", None, 0, headers=[*reason.headers()])
    assert not producer.flush(LIMIT_S)
    shown = command("list", topic)
    assert "in the letter" in shown
    assert "None" not in shown
    said = command("replay", topic)
    assert "1 dead letter left out: a service has refused it after the checkpoint" in said
    assert f"Send each again by hand: `dead-letters show {topic} PARTITION:OFFSET`" in said
    assert "behind an operator" not in said
    assert "send that again by hand" in command("replay", topic, "0:0", code=2)


def values_in(kafka: KafkaCluster, topic: str, count: int) -> list[bytes | None]:
    """The values of *topic*, once there are *count*: a commit ends a moment before readers see it."""
    until(lambda: len(kafka.read_committed(topic)) >= count)
    return [record.value for record in kafka.read_committed(topic)]


def test_some_letters_are_sent_back_some_edited_and_some_discarded(
    kafka: KafkaCluster, topic_name: str, command: Callable[..., str], tmp_path: Path
) -> None:
    """Each is open, replayed or discarded, and only open ones are sent."""
    topic, sent = f"{topic_name}-dead", f"{topic_name}-in"
    written(kafka, topic_name, [b"a", b"b", b"c", b"\xff", b"e"], "parse", "check")

    def states() -> list[tuple[str, str]]:
        facts = map(json.loads, command("list", topic, "--json").splitlines())
        return [(fact["place"], fact["state"]) for fact in facts if fact["state"] != "open"]

    chosen = "--match", "no. 1", "--operator", "check"
    assert "1 open: check ValueError 1" in command("replay", topic, *chosen, "--dry-run")
    assert states() == []
    assert "1 record sent back" in command("replay", topic, *chosen)
    assert values_in(kafka, sent, 1) == [b"b"]
    until(lambda: states() == [("0:3", "replayed")], told=states)
    assert "1 dead letter of records that were sent back before" in command("replay", topic, "0:2")
    assert values_in(kafka, sent, 1) == [b"b"]
    until(lambda: states() == [("0:2", "replayed"), ("0:3", "replayed")], told=states)
    assert "is replayed already" in command("replay", topic, "0:3", code=2)
    fact = json.loads(command("show", topic, "0:6", "--json"))
    assert fact["value"] == {"base64": "/w=="}
    assert fact["headers"] == [["h", "1"]]
    edited = tmp_path / "edited"
    edited.write_text("")
    assert "has no letters, so nothing was sent" in command("replay", topic, "--value", str(edited), code=2)
    edited.write_text(json.dumps({**fact, "topic": "elsewhere"}))
    assert "has another topic" in command("replay", topic, "--value", str(edited), code=2)
    edited.write_text(json.dumps({**fact, "value": "d"}, indent=2))
    command("replay", topic, "--value", str(edited))
    assert values_in(kafka, sent, 2) == [b"b", b"d"]
    assert kafka.read_committed(sent)[-1].headers == (("h", b"1"),)
    assert "say which letters" in command("discard", topic, code=2)
    assert "There is no dead letter" in command("discard", topic, "0:77", code=2)
    assert "1 dead letter of" in command("discard", topic, "0:0")
    assert "There are no such dead letters" in command("list", topic, "--to", "2026-01-01T00:00:00Z")
    assert "There are no such dead letters" in command("list", topic, "--partition", "1")
    assert "8 dead letters of" not in command("discard", topic, "--from", "2026-01-01T00:00:00Z", "--dry-run")
    command("replay", topic)
    assert values_in(kafka, sent, 5) == [b"b", b"d", b"a", b"c", b"e"]
    until(lambda: {state for _, state in states()} == {"replayed", "discarded"}, told=states)
    assert "base64 /w==" in command("show", topic, "0:6")
    assert "1 discarded" in command("list", topic)
    assert "no such open dead letter" in command("replay", topic)


def test_each_letter_is_sent_once_where_a_replay_dies_or_another_begins(
    kafka: KafkaCluster, topic_name: str, command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a replay has not committed is not seen; one that was overtaken sends nothing more."""
    topic, sent = f"{topic_name}-dead", f"{topic_name}-in"
    written(kafka, topic_name, [b"a", b"b", b"c"])
    letters = Letters(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}), topic)
    dying = letters.ending()
    with monkeypatch.context() as patched:
        patched.setattr(LetterEndings, "_call", lambda self, name, *rest: (
            getattr(self._producer, name)(*rest) if name == "begin_transaction" else None
        ))  # fmt: skip
        dying.end([*letters.all()][:2], REPLAYED)
    assert [letter.state for letter in letters.all()] == ["open"] * 3
    assert "3 records sent back" in command("replay", topic)
    assert values_in(kafka, sent, 3) == [b"a", b"b", b"c"]
    with pytest.raises(Fenced, match="Another command on the letters of"):
        dying._call("commit_transaction", LIMIT_S)
    call = LetterEndings._call
    monkeypatch.setattr(
        LetterEndings, "_call", lambda self, name, *rest: None if name.startswith("begin") else call(self, name, *rest)
    )
    with pytest.raises(Fenced, match="Another command on the letters of"):  # the client refuses to produce
        dying.end([*letters.all()], REPLAYED)
    until(lambda: [letter.state for letter in letters.all()] == [REPLAYED] * 3)


def test_letters_sent_back_by_an_earlier_version_are_not_sent_again(
    kafka: KafkaCluster, topic_name: str, command: Callable[..., str]
) -> None:
    """Its replays were pipelines, whose checkpoints say how far they came."""
    topic, sent = f"{topic_name}-dead", f"{topic_name}-in"
    written(kafka, topic_name, [b"a", b"b"])
    pipeline = Pipeline(f"replay-{topic}")
    earlier = pipeline.source("letters", KafkaSource(topic, value=bytes | None))
    earlier.sink("to", KafkaSink(sent, create_partitions=None))
    pipeline.run(bootstrap_servers=kafka.bootstrap_servers, until="latest", inline=True, log_level="error")
    assert "2 replayed" in command("list", topic)
    assert "no such open dead letter" in command("replay", topic)
    assert values_in(kafka, sent, 2) == [b"a", b"b"]


class Timed(msgspec.Struct):
    at: int


def known(timed: Timed) -> Timed:
    if timed.at % 10 == 7:
        raise ValueError("unknown")
    return timed


def test_a_replay_says_how_many_records_would_come_late_and_asks(
    kafka: KafkaCluster, topic_name: str, command: Callable[..., str]
) -> None:
    topic, sent = f"{topic_name}-dead", kafka.create_topic(f"{topic_name}-in")
    kafka.produce(sent, [("k", msgspec.json.encode(Timed(at))) for at in (17, 1_000, 2_007, 1_007)], 0)
    pipeline = Pipeline(topic_name)
    read = pipeline.source("in", KafkaSource(sent, value=Timed, time=EventTime("at", disorder="1s", ahead=None)))
    times = read.map(known, id="known", on_error=DeadLetters(topic)).key_by(lambda timed: timed.at)
    times.window(Tumbling("1s")).aggregate("counts", Count()).sink("out", KafkaSink(f"{topic_name}-out"))
    pipeline.run(bootstrap_servers=kafka.bootstrap_servers, until="latest", inline=True, log_level="error")
    facts = [json.loads(line) for line in command("list", topic, "--json").splitlines()]
    assert sorted(fact["event_time"] for fact in facts) == [17, 1_007, 2_007]
    shown = command("replay", topic, code=2)
    assert "Of 3 records, 1 would come late" in shown, "1,007 is as old as the latest one less the disorder"
    assert "has read up to 1970-01-01T00:00:01.006Z" in shown
    assert len(values_in(kafka, sent, 4)) == 4
    assert "3 records sent back" in command("replay", topic, "--yes")

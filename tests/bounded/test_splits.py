"""Partitions that several units read: all that a checkpoint has is as if one unit had read each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from auditing import Quiet, audited
from bounded import Fed, catch_up, load_pipeline, state, twice
from confluent_kafka import Producer
from running import orders
from settled import await_readable

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.bounded.catch_up import Summary
from exactlyonce.engines.bounded.reproduce import Replay
from exactlyonce.engines.bounded.stages import Executors, in_process, split, splittable_tasks
from exactlyonce.engines.bounded.unit.messages import Reading, Unit
from exactlyonce.engines.plan import plan
from exactlyonce.engines.runtime.order_log import runs_of

BAD = b'{"id": 7, "customer": 12, "total": 1}'
PARALLELISM = 4


class Outcome(NamedTuple):
    """All that a checkpoint says and shows."""

    outputs: dict[str, list[tuple[int, bytes | None, bytes | None, Any]]]
    chains: dict[Any, Any]
    offsets: tuple[Any, ...]
    taken: dict[tuple[str, int], dict[tuple[str, int], int]]
    """By task and subtask, the records in its order log by input."""
    skipped: dict[Any, Any]
    summary: tuple[int, int]


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`splits(n)`: a split has at least so many offsets."""
    return lambda offsets: monkeypatch.setattr("exactlyonce.engines.bounded.stages.SPLIT_OFFSETS_MIN", offsets)


@pytest.fixture
def source(fed: Fed) -> str:
    """A topic of one partition with transactions across every place, one of which is aborted, and bad records."""
    topic = f"{fed.name}-wide"
    fed.kafka.create_topic(topic, 1)
    producers = [transactional(fed, f"{topic}-{number}") for number in range(3)]
    for producer in producers:
        producer.begin_transaction()
    made = orders(600)
    for place in range(0, 600, 20):  # all three write in turn, so each transaction spans nearly the whole topic
        producer = producers[place // 20 % 3]
        for key, value in made[place : place + 20]:
            producer.produce(topic, value.encode(), key.encode())
        producer.produce(topic, BAD)
        producer.flush()
    producers[0].commit_transaction()
    producers[1].abort_transaction()
    producers[2].commit_transaction()
    await_readable(fed.kafka, topic)
    return topic


def transactional(fed: Fed, id: str) -> Producer:
    settings = {"bootstrap.servers": fed.kafka.bootstrap_servers, "transactional.id": id}
    producer = Producer(settings)
    producer.init_transactions()
    return producer


class Counting:
    """A `Submit` that runs units here, and notes how many each stage has."""

    def __init__(self, submit: Callable[[str, Sequence[bytes]], list[bytes]] = in_process) -> None:
        self.submit, self.units = submit, dict[str, int]()

    def __call__(self, stage: str, work: Sequence[bytes]) -> list[bytes]:
        self.units[stage.partition("stage ")[2]] = len(work)
        return self.submit(stage, work)


def outcome(fed: Fed, name: str, source: str, folder: Path, submit: Any, **params: str) -> Outcome:
    """The outcome of a backfill of pipeline *name*, which an audit and a replay without splits agree with."""
    loaded = load_pipeline("bounded_pipelines", "wide", name, source=source, **params)
    summary = catch_up(fed, loaded, PARALLELISM, folder, submit=submit, from_nothing=True)
    sinks = ("copies", "out", "letters")
    await_readable(fed.kafka, *(f"{name}-{sink}" for sink in sinks))
    outputs = {
        sink: [
            (record.partition, record.key, record.value, record.headers)
            for record in fed.kafka.read_committed(f"{name}-{sink}")
        ]
        for sink in sinks
    }
    assert not audited(loaded, fed.config, folder).findings
    replayed = Replay(loaded, fed.config, summary.checkpoint).run(Executors(in_process, folder, lambda: 1), Quiet())
    assert (replayed.agrees, replayed.records) == (True, summary.records)
    manifest = summary.manifest
    return Outcome(
        outputs=nameless(outputs, name),
        chains=state(fed.kafka, loaded, manifest, "chain"),
        offsets=manifest.offsets,
        taken=taken(fed, manifest),
        skipped=skipped(summary),
        summary=(summary.records, summary.records_out),
    )


def nameless(outputs: Any, name: str) -> Any:
    """*outputs* without the name of their pipeline, which dead letters have."""
    return {
        sink: [
            (partition, key, value, headers and [(h, v and v.replace(name.encode(), b"")) for h, v in headers])
            for partition, key, value, headers in records
        ]
        for sink, records in outputs.items()
    }


def taken(fed: Fed, manifest: Manifest) -> dict[tuple[str, int], dict[tuple[str, int], int]]:
    topic = find_topic(fed.config, manifest.pipeline)
    counts = dict[tuple[str, int], dict[tuple[str, int], int]]()
    with closing(block_storage(fed.config, topic, manifest.storage)) as storage:
        for log in manifest.order_logs:
            bodies = {ref: block.body for ref, block in storage.fetch(log.blocks)}
            own = counts.setdefault((log.task, log.subtask), {})
            for (name, partition, _), count in runs_of([bodies[ref] for ref in log.blocks]):
                place = name, partition
                own[place] = own.get(place, 0) + count
    return counts


def skipped(summary: Summary) -> dict[Any, Any]:
    return {place: (each.count, each.first) for place, each in summary.skipped.items()}


def test_splits_give_what_one_unit_gives(fed: Fed, source: str, tmp_path: Path, splits: Callable[[int], None]) -> None:
    """Outputs and their order, state, offsets, order log, skipped records; also with units that are tried twice."""
    whole, submit = Counting(), Counting(twice)
    expected = outcome(fed, f"{fed.name}-one", source, tmp_path, whole)
    splits(100)
    assert outcome(fed, f"{fed.name}-two", source, tmp_path, submit) == expected
    assert (whole.units["orders"], submit.units["orders"]) == (PARALLELISM, 2 * PARALLELISM - 1)
    assert expected.summary[0] == 420
    assert expected.outputs["letters"]
    nothing_left(fed, f"{fed.name}-two")


def test_outputs_without_a_key_are_computed_in_one_unit(
    fed: Fed, source: str, tmp_path: Path, splits: Callable[[int], None]
) -> None:
    """Their partitions depend on all outputs before, so splits that had some are dropped, with all that they wrote."""
    expected = outcome(fed, f"{fed.name}-one", source, tmp_path, in_process, keys="some")
    splits(100)
    submit = Counting()
    assert outcome(fed, f"{fed.name}-two", source, tmp_path, submit, keys="some") == expected
    split_units, whole_units = submit.units["orders"], submit.units["orders without splits"]
    assert (split_units, whole_units) == (2 * PARALLELISM - 1, PARALLELISM)
    nothing_left(fed, f"{fed.name}-two")


def nothing_left(fed: Fed, name: str) -> None:
    checked = Fed.__new__(Fed)
    checked.kafka, checked.name, checked.storage = fed.kafka, name, ""
    checked.assert_nothing_left()


@pytest.mark.parametrize(
    ("pipeline", "tasks"),
    [
        (("bounded_pipelines", "wide", {"source": "in"}), {"orders"}),
        (("bounded_pipelines", "wide", {"source": "in", "keys": "none"}), set()),
        (("bounded_pipelines", "rejoined", {}), set()),
        (("pipelines", "partitioned", {}), set()),
    ],
    ids=["keys", "no keys", "rejoined", "state by partition"],
)
def test_the_tasks_that_may_be_split(pipeline: tuple[str, str, dict[str, str]], tasks: set[str]) -> None:
    module, attribute, params = pipeline
    graph = load_pipeline(module, attribute, "some", **params).pipeline.build()
    assert splittable_tasks(plan(graph, 2)) == tasks


def test_a_task_with_state_is_not_split() -> None:
    """At parallelism 1 nothing is shuffled, so all of it is one task."""
    graph = load_pipeline("bounded_pipelines", "wide", "some", source="in").pipeline.build()
    assert splittable_tasks(plan(graph, 1)) == set()


def ranges(unit: Unit, parallelism: int, offsets: int) -> Iterator[tuple[int, int]]:
    return ((part.readings[0].start, part.readings[0].end) for part in split(unit, parallelism, offsets))


def test_units_go_to_partitions_by_their_length() -> None:
    reading = Reading("orders", "in", "id", 0, 1_000_007, 2_000_007)
    unit = Unit("orders", 0, (reading,), None, {})
    assert list(ranges(unit, 2, 1_000_000)) == [(1_000_007, 1_500_007), (1_500_007, 2_000_007)]
    assert len(list(ranges(unit, 8, 2_000_000))) == 4, "half of the input gets half of the units"
    assert len(list(ranges(unit, 64, 1_000_000))) == 10, "a split has 100,000 offsets at least"
    assert list(split(unit, 2, 4_000_000)) == [unit]
    several = Unit("orders", 0, (reading, reading), None, {})
    assert list(split(several, 64, 2_000_000)) == [several], "they are taken by time"

"""Savepoints against pipelines: ids of operators and sources, their mapping, and the new run's blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import fastavro
import msgspec
import pytest
from blank_manifest import blank_manifest

from exactlyonce import Count, Pipeline, Tumbling
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors import KafkaSource
from exactlyonce.connectors.block_files import FileStorage
from exactlyonce.connectors.filestore.local import LocalStore
from exactlyonce.engines.options import Restoration
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.batch import BatchCodec
from exactlyonce.engines.savepoints.contents import (
    KeptEntry,
    LoopEntry,
    Saved,
    SavedLoop,
    SavedOperator,
    SavedTimes,
    TopicSavepoint,
    kept_state,
)
from exactlyonce.engines.savepoints.exported import METADATA, ExportedSavepoint, export
from exactlyonce.engines.savepoints.restoring import RestoreTarget, Restoring, fitting, require_readable
from exactlyonce.pipeline.errors import ConfigError, Fenced, GraphError, StorageUnavailable
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.sinks import KafkaSink
from exactlyonce.state.errors import StateIncompatible


def count(state: int | None, record: bytes) -> tuple[int, bytes]:
    return (state or 0) + 1, record


def graph(max_parallelism: int = 128, key: Callable[[bytes], Any] = lambda record: record) -> LogicalGraph:
    pipeline = Pipeline("totals", max_parallelism=max_parallelism)
    source = pipeline.source("right", KafkaSource("orders", value=bytes))
    source.key_by(key).stateful_map("counts", count).sink("out", KafkaSink("totals"))
    return pipeline.build()


def versioned(**migrations: Any) -> LogicalGraph:
    pipeline = Pipeline("totals")
    source = pipeline.source("right", KafkaSource("orders", value=bytes))
    counted = source.key_by(lambda record: record).stateful_map("counts", count, state_version=2, **migrations)
    counted.sink("out", KafkaSink("totals"))
    return pipeline.build()


def saved(sources: tuple[str, ...], operators: tuple[str, ...]) -> Saved:
    return Saved(
        pipeline="totals", checkpoint=7, kind="savepoint", cluster_id="c", completed_at_ms=0, max_parallelism=128,
        fingerprint="", offsets=tuple(SourceOffset(each, "orders", "id", 0, 10) for each in sources),
        operators=tuple(map(SavedOperator, operators)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sources", "operators", "mapping"),
    [
        (("left", "right"), ("counts",), {"left": "right"}),
        (("right",), ("counts", "older"), {"older": "counts"}),
        (("right",), ("old", "older"), {"old": "counts", "older": "counts"}),
    ],
)
def test_two_do_not_become_one(sources: tuple[str, ...], operators: tuple[str, ...], mapping: dict[str, str]) -> None:
    """Their states or offsets could not be told apart, even where dropping is allowed."""
    for allowed in (False, True):
        with pytest.raises(GraphError, match=r"would both become '\w+', which .* Leave that --map out"):
            fitting(saved(sources, operators), graph(), Restoration("7", mapping, allowed))


def test_what_changes_places_fits() -> None:
    found = fitting(saved(("left",), ("older",)), graph(), Restoration("7", {"left": "right", "older": "counts"}))
    assert {new: each.operator for new, each in found.items()} == {"counts": "older"}


@dataclass(frozen=True)
class Given:
    saved: Saved
    states: list[KeptEntry]
    rounds: tuple[LoopEntry, ...] = ()
    origin: str = "given"
    name: str = "a savepoint"

    def entries(self, operator: str) -> Iterator[KeptEntry]:
        return iter(self.states)

    def loop_entries(self, loop: str) -> Iterator[LoopEntry]:
        return iter(self.rounds)


@pytest.fixture
def restoring(storage: FileStorage) -> Callable[..., Restoring]:
    """`restoring(url, graph(), 3)`: into three subtasks, where there is topic `orders`, as source `right`."""

    def made(
        url: str, graph: LogicalGraph, parallelism: int = 1, mapping: dict[str, str] | None = None, *,
        allowed: bool = False, notes: list[str] | None = None,
    ) -> Restoring:  # fmt: skip
        inputs: Any = SimpleNamespace(
            sources={"right": SimpleNamespace(topic="orders", place="orders")}, others={},
            described={"orders": SimpleNamespace(topic_id="id")},
            find_splits=lambda known: (), start_offsets=lambda known: (), check_continuity=lambda manifest: None,
        )  # fmt: skip
        storages: Any = SimpleNamespace(of={"there": storage}.__getitem__)
        told = [] if notes is None else notes
        around = RestoreTarget(graph, inputs, "c", parallelism, storages, "there", told.append)
        return Restoring(Restoration(url, mapping or {}, allowed), around, None)

    return made


def exported_counts(folder: Path, state: Any = 2) -> tuple[str, list[KeptEntry]]:
    keys = [canonical_key(b"%d" % number) for number in range(1_000)]
    states = sorted(KeptEntry(key_group(key, 128), key, msgspec.msgpack.encode(state), 1) for key in keys)
    kept = msgspec.structs.replace(saved(("right",), ()), operators=(SavedOperator("counts", "int", 1),))
    return export(Given(kept, states), f"file://{folder}"), states


@pytest.mark.parametrize("max_parallelism", [128, 24, 512])
def test_states_are_written_anew(max_parallelism: int, tmp_path: Path, storage: Any, restoring: Any) -> None:
    url, states = exported_counts(tmp_path)
    notes = list[str]()
    restored = restoring(url, graph(max_parallelism), 3, notes=notes).write(0, 1)
    manifest = blank_manifest(operators=restored.operators, max_parallelism=max_parallelism)
    found = list(kept_state(manifest, "counts", storage).entries())
    assert sorted(found) == sorted(each._replace(group=key_group(each.key, max_parallelism)) for each in states)
    assert (restored.offsets, len(restored.operators[0].index)) == (saved(("right",), ()).offsets, 3)
    assert url in notes[0]


def test_states_of_two_versions(tmp_path: Path, storage: Any, restoring: Any) -> None:
    """They need the migration. Only the newer ones have the file's schema."""
    keys = [canonical_key(b"%d" % number) for number in range(1_000)]
    states = sorted(
        KeptEntry(key_group(key, 128), key, msgspec.msgpack.encode(number), 1 + number % 2)
        for number, key in enumerate(keys)
    )
    kept = msgspec.structs.replace(saved(("right",), ()), operators=(SavedOperator("counts", "int", 2),))
    url = export(Given(kept, states), f"file://{tmp_path}")
    exported = ExportedSavepoint.at(url)
    assert sorted(each.version for each in exported.operator("counts").files) == [1, 2]
    assert sorted(exported.entries("counts")) == states
    for each in exported.operator("counts").files:
        with (Path(url.removeprefix("file://")) / each.name).open("rb") as file:
            found = fastavro.reader(file).metadata
        assert (found["exactlyonce.state_version"], found.get("exactlyonce.state_schema")) == (
            str(each.version), '"int"' if each.version == 2 else None
        )  # fmt: skip
    with pytest.raises(StateIncompatible, match=r"operator 'counts' is of version 2, .* no migration of version 1"):
        restoring(url, versioned(), 3)
    restored = restoring(url, versioned(migrations={1: lambda state: state}), 3).write(0, 1)
    manifest = blank_manifest(operators=restored.operators)
    assert sorted(kept_state(manifest, "counts", storage).entries()) == states


def windows(max_parallelism: int = 128, size: str = "10s") -> LogicalGraph:
    pipeline = Pipeline("totals", max_parallelism=max_parallelism)
    source = pipeline.source("right", KafkaSource("orders", value=bytes, time=len))
    counts = source.key_by(lambda record: record).window(Tumbling(size)).aggregate("counts", Count())
    counts.sink("out", KafkaSink("totals"))
    return pipeline.build()


def exported_windows(folder: Path, watermarks: dict[int, int], of: str = "") -> tuple[str, list[KeptEntry]]:
    """Two windows of one key."""
    key = canonical_key(b"ann")
    states = [KeptEntry(key_group(key, 128), key, b"\x02", 1, slot) for slot in (-1, 9_999)]
    counts = SavedOperator("counts", "int", times=SavedTimes(f"tumbling=10000{of}", watermarks))
    return export(
        Given(msgspec.structs.replace(saved(("right",), ()), operators=(counts,)), states), f"file://{folder}"
    ), states


@pytest.mark.parametrize("max_parallelism", [128, 24])
def test_windows_are_written_anew_by_key_with_all_watermarks(
    max_parallelism: int, tmp_path: Path, storage: Any, restoring: Any
) -> None:
    """Also in the two subtasks without a window."""
    url, states = exported_windows(tmp_path, dict.fromkeys(range(128), -5))
    restored = restoring(url, windows(max_parallelism), 3).write(0, 1)
    newest = blank_manifest(operators=restored.operators, max_parallelism=max_parallelism)
    kept = kept_state(newest, "counts", storage)
    assert list(kept.entries()) == [each._replace(group=key_group(each.key, max_parallelism)) for each in states]
    assert kept.times() == SavedTimes("tumbling=10000", dict.fromkeys(range(max_parallelism), -5))
    require_readable(windows(max_parallelism), newest, storage)
    with pytest.raises(StateIncompatible, match=r"'counts' is of tumbling=10000, .* now has tumbling=20000"):
        require_readable(windows(max_parallelism, "20s"), newest, storage)


def test_a_savepoint_within_a_firing_goes_on_where_it_was(tmp_path: Path, storage: Any, restoring: Any) -> None:
    """It has no place in the key groups of another number."""
    times = SavedTimes("tumbling=10000", dict.fromkeys(range(128), -5), {7: (-1, b"ann")})
    operator = SavedOperator("counts", "int", times=times)
    given = Given(msgspec.structs.replace(saved(("right",), ()), operators=(operator,)), [])
    url = export(given, f"file://{tmp_path}")
    restored = restoring(url, windows(), 3).write(0, 1)
    newest = blank_manifest(operators=restored.operators, max_parallelism=128)
    assert kept_state(newest, "counts", storage).times() == times
    with pytest.raises(ConfigError, match="different times in different key groups"):
        restoring(url, windows(24))


def test_entries_of_several_keys_stay_in_their_key_group(tmp_path: Path, restoring: Any) -> None:
    def once(max_parallelism: int) -> LogicalGraph:
        pipeline = Pipeline("totals", max_parallelism=max_parallelism)
        source = pipeline.source("right", KafkaSource("orders", value=bytes, time=len))
        first = source.key_by(lambda record: record).deduplicate("counts", within="1h")
        first.sink("out", KafkaSink("totals"))
        return pipeline.build()

    (node,) = once(128).stateful
    times = SavedTimes(node.meaning or "", {})
    kept = msgspec.structs.replace(saved(("right",), ()), operators=(SavedOperator("counts", "int", times=times),))
    url = export(Given(kept, []), f"file://{tmp_path}")
    with pytest.raises(
        ConfigError, match=r"'counts' keeps entries of several keys .*other groups than 128\. Keep max_"
    ):
        restoring(url, once(24))


def test_windows_that_do_not_fit(tmp_path: Path, restoring: Any) -> None:
    url, _ = exported_windows(tmp_path, {0: 7})
    with pytest.raises(StateIncompatible, match=r"tumbling=10000, .* tumbling=20000.* --allow-dropped-state"):
        restoring(url, windows(size="20s"))
    assert restoring(url, windows(size="20s"), allowed=True).write(0, 1).operators == ()
    with pytest.raises(
        StateIncompatible, match=r"'counts' is kept by time, and the pipeline now keeps it by key alone"
    ):
        restoring(url, graph())
    with pytest.raises(ConfigError, match=r"different times in different key groups.* Keep max_parallelism 128; or"):
        restoring(url, windows(24))
    of_sums, _ = exported_windows(tmp_path, {}, " of=Sum")
    with pytest.raises(StateIncompatible, match=r"is of tumbling=10000 of=Sum, .* now has tumbling=10000 of=Count"):
        restoring(of_sums, windows())
    (counts,) = restoring(url, windows(), 2).write(0, 1).operators
    assert [len(index) for index in counts.index] == [1, 1]


def test_windows_by_partition_at_different_times(tmp_path: Path, storage: Any, restoring: Any) -> None:
    """Subtasks share key groups, whose watermarks in one table would be wrong for one of them."""
    indexes = []
    for group, watermark in ((3, 5), (3, 7)):
        url, _ = exported_windows(tmp_path, {group: watermark})
        (counts,) = restoring(url, windows()).write(0, 1).operators
        indexes.append(counts.index[0])
    of_two = blank_manifest(operators=(msgspec.structs.replace(counts, parallelism=2, index=tuple(indexes)),))
    with pytest.raises(ConfigError, match=r"'counts' is keyed by the source's partitions.* parallelism 2, as before"):
        kept_state(of_two, "counts", storage).times()


def by_name(record: bytes) -> str:
    return record.decode()


def by_number(record: bytes) -> int:
    return len(record)


def test_state_by_other_keys(tmp_path: Path, storage: Any, restoring: Any) -> None:
    states = [KeptEntry(key_group(key, 128), key, b"\x05", 1) for key in (canonical_key("ann"),)]
    kept = msgspec.structs.replace(saved(("right",), ()), operators=(SavedOperator("counts", "int", 1, keys="str"),))
    url = export(Given(kept, states), f"file://{tmp_path}")
    assert ExportedSavepoint.at(url).operator("counts").keys == "str"
    same, other = graph(key=by_name), graph(key=by_number)
    with pytest.raises(StateIncompatible, match=r"'counts' has keys of type \"str\", .*\"int\".*allow-dropped-state"):
        restoring(url, other)
    assert restoring(url, other, allowed=True).write(0, 1).operators == ()
    restored = restoring(url, same).write(0, 1)
    newest = blank_manifest(operators=restored.operators, fingerprint=same.fingerprint())
    require_readable(same, newest, storage)
    with pytest.raises(StateIncompatible, match=r"'counts' has keys of type \"str\", and key_by gives .*\"int\""):
        require_readable(other, newest, storage)


def test_what_waits_for_the_storage_looks_whether_it_is_fenced(
    tmp_path: Path, monkeypatch: Any, storage: Any, restoring: Any
) -> None:
    """A storage that is away is waited for ten minutes: not by who is fenced."""
    url, _ = exported_counts(tmp_path)
    held_up, written = restoring(url, graph(), 3), Event()

    def away(self: LocalStore, name: str, content: Any, aside: str) -> bool:
        written.set()
        raise StorageUnavailable("away")

    def raise_if_fenced() -> None:
        if written.is_set():
            raise Fenced("A newer instance took over.")

    monkeypatch.setattr(LocalStore, "put", away)
    with pytest.raises(Fenced):
        held_up.write(0, 1, raise_if_fenced)


def looping(type_: Any = int, loop: str = "again") -> LogicalGraph:
    pipeline = Pipeline("totals")
    again = pipeline.feedback(loop, type_)
    stream = pipeline.source("right", KafkaSource("orders", value=type_)).union(again)
    stream.filter(bool).feed(again)
    stream.filter(bool).sink("out", KafkaSink("totals"))
    return pipeline.build()


ROUNDS = tuple(
    LoopEntry(subtask, msgspec.msgpack.encode(1_000 * subtask + number), "orders", subtask, number)
    for subtask in range(3)
    for number in range(700)
)


def exported_loop(folder: Path) -> str:
    kept = msgspec.structs.replace(saved(("right",), ()), loops=(SavedLoop("again", len(ROUNDS)),))
    return export(Given(kept, [], ROUNDS), f"file://{folder}")


@pytest.mark.parametrize(("loop", "mapping"), [("again", {}), ("renamed", {"again": "renamed"})])
@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_what_goes_round_is_written_anew(
    parallelism: int, loop: str, mapping: dict[str, str], tmp_path: Path, storage: Any, restoring: Any
) -> None:
    url = exported_loop(tmp_path)
    now = looping(loop=loop)
    logs = restoring(url, now, parallelism, mapping).write(0, 1).channel_logs
    assert sum(each.records for each in logs) == len(ROUNDS)
    manifest = blank_manifest(channel_logs=logs, parallelism=parallelism, fingerprint=now.fingerprint())
    found = []
    for subtask in range(parallelism):
        frames = in_flight.restored(manifest, now, subtask, parallelism, storage)
        assert {each.edge for each in frames} <= {f">{loop}"}
        batches = [BatchCodec(int).decode(each.frame) for each in frames]
        found += [
            (record, o.partition(), o.offset()) for b in batches for record, o in zip(b.records, b.origins, strict=True)
        ]
    numbers = [(msgspec.msgpack.decode(each.record), each.partition, each.offset) for each in ROUNDS]
    assert sorted(found) == sorted(numbers)
    for subtask in range(3):
        assert [each for each in found if each[1] == subtask] == [each for each in numbers if each[1] == subtask]


def test_a_loop_in_which_nothing_went_round(tmp_path: Path, restoring: Any) -> None:
    url = export(Given(saved(("right",), ()), []), f"file://{tmp_path}")
    now = looping(loop="renamed")
    assert restoring(url, now, 1, {"again": "renamed"}).write(0, 1).channel_logs == ()
    with pytest.raises(GraphError, match="--map again=right: the savepoint has no state and no source of 'again'"):
        restoring(url, now, 1, {"again": "right"})


def test_a_loop_that_is_gone(tmp_path: Path, restoring: Any) -> None:
    url = exported_loop(tmp_path)
    now = graph()
    with pytest.raises(GraphError, match=r"2100 records that go round loop 'again'.* --map again=NEW; .*dropped-state"):
        restoring(url, now)
    assert restoring(url, now, allowed=True).write(0, 1).channel_logs == ()


class Order(msgspec.Struct):
    id: int


def test_a_loop_of_another_type(tmp_path: Path, restoring: Any) -> None:
    url = exported_loop(tmp_path)
    with pytest.raises(GraphError, match=r"'again', written as another type than Order.*Expected.*orders\[0\] off"):
        restoring(url, looping(Order), 1)


def test_a_savepoint_says_what_goes_round(tmp_path: Path, storage: Any, restoring: Any) -> None:
    kept = msgspec.structs.replace(saved(("right",), ()), loops=(SavedLoop("again", len(ROUNDS), "int"),))
    url = export(Given(kept, [], ROUNDS), f"file://{tmp_path}")
    now = looping(loop="renamed")
    logs = restoring(url, now, 2, {"again": "renamed"}).write(0, 1).channel_logs
    (loop,) = TopicSavepoint(blank_manifest(channel_logs=logs), storage, "c").saved.loops
    assert (loop.loop, loop.records, loop.schema) == ("renamed", len(ROUNDS), "int")
    with pytest.raises(GraphError, match=r"'again', written as another type than str, .*str is str now, and was int"):
        restoring(url, looping(str), 1)
    older = exported_loop(tmp_path)
    (log,) = restoring(older, looping(), 1).write(0, 1).channel_logs
    assert in_flight.loop_schemas(log, storage) == {}


def test_an_older_version_does_not_leave_behind_what_goes_round(tmp_path: Path) -> None:
    """An export with loops is of format 2, which it refuses; one without is of format 1."""
    url, without = exported_loop(tmp_path), export(Given(saved((), ()), []), f"file://{tmp_path}")
    formats = [
        json.loads(Path(each.removeprefix("file://"), METADATA).read_text())["format"] for each in (url, without)
    ]
    assert formats == [2, 1]
    assert ExportedSavepoint.at(url).damage() == []
    (Path(url.removeprefix("file://")) / "again-0.avro").unlink()
    assert [" is missing" in each for each in ExportedSavepoint.at(url).damage()] == [True]

"""A savepoint against a pipeline: what fits by the ids of operators and sources, and as they are mapped; and its states
as blocks of what goes on from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from exactlyonce import Pipeline
from exactlyonce.checkpoint.records.manifest import Manifest, SourceOffset
from exactlyonce.checkpoint.store.files.local import LocalFolder
from exactlyonce.checkpoint.store.files.storage import FileStorage
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.options import Restoration
from exactlyonce.engines.savepoints.contents import Saved, SavedOperator
from exactlyonce.engines.savepoints.exported import export
from exactlyonce.engines.savepoints.kept_state import KeptEntry, kept_state
from exactlyonce.engines.savepoints.restoring import Restoring, Surroundings, fitting
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.sinks import KafkaSink


def count(state: int | None, record: bytes) -> tuple[int, bytes]:
    """How many there were."""
    return (state or 0) + 1, record


def graph(max_parallelism: int = 128) -> LogicalGraph:
    """Source `right` and operator `counts`."""
    pipeline = Pipeline("totals", max_parallelism=max_parallelism)
    source = pipeline.source("right", KafkaSource("orders", value=bytes))
    source.key_by(lambda record: record).stateful_map("counts", count).sink("out", KafkaSink("totals"))
    return pipeline.build()


def saved(sources: tuple[str, ...], operators: tuple[str, ...]) -> Saved:
    """A savepoint of so many sources, all of one topic, and operators."""
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
    """Neither states nor offsets of two could be told apart then, whether or not what is left over may be dropped."""
    for allowed in (False, True):
        with pytest.raises(GraphError, match=r"would both become '\w+', which .* Leave that --map out"):
            fitting(saved(sources, operators), graph(), Restoration("7", mapping, allowed))


def test_what_changes_places_fits() -> None:
    """A mapping is of the savepoint's ids, all at once."""
    found = fitting(saved(("left",), ("older",)), graph(), Restoration("7", {"left": "right", "older": "counts"}))
    assert {new: each.operator for new, each in found.items()} == {"counts": "older"}


@dataclass(frozen=True)
class Given:
    """A savepoint of states that a test gives."""

    saved: Saved
    states: list[KeptEntry]
    origin: str = "given"
    name: str = "a savepoint"

    def entries(self, operator: str) -> Iterator[KeptEntry]:
        return iter(self.states)


@pytest.mark.parametrize("max_parallelism", [128, 24])
def test_states_are_written_anew(max_parallelism: int, tmp_path: Path, manifest_of: Callable[..., Manifest]) -> None:
    """From an export into blocks of three subtasks: every state is there, in the key group that is its key's now."""
    keys = [canonical_key(b"%d" % number) for number in range(1_000)]
    states = sorted(KeptEntry(key_group(key, 128), key, msgspec.msgpack.encode(len(key)), 1) for key in keys)
    operator = SavedOperator("counts", "int", 1)
    kept = msgspec.structs.replace(saved(("right",), ()), operators=(operator,))
    url = export(Given(kept, states), f"file://{tmp_path}")
    inputs: Any = SimpleNamespace(
        sources={"right": SimpleNamespace(topic="orders")}, described={"orders": SimpleNamespace(topic_id="id")},
        start_offsets=tuple, check_continuity=lambda manifest: None,
    )  # fmt: skip
    notes = list[str]()
    storage = FileStorage(LocalFolder(tmp_path, "blocks"))
    storages: Any = SimpleNamespace(of={"there": storage}.__getitem__)
    around = Surroundings(graph(max_parallelism), inputs, "c", 3, storages, "there", notes.append)
    restored = Restoring(Restoration(url), around, None).write(0, 1)
    manifest = manifest_of("totals", operators=restored.operators, max_parallelism=max_parallelism)
    found = list(kept_state(manifest, "counts", storage).entries())
    assert sorted(found) == sorted(each._replace(group=key_group(each.key, max_parallelism)) for each in states)
    assert (restored.offsets, len(restored.operators[0].index)) == (kept.offsets, 3)
    assert url in notes[0]
    storage.close()

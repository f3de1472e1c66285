"""A savepoint against a pipeline: what fits by the ids of operators and sources, and as they are mapped."""

from __future__ import annotations

import pytest

from exactlyonce import Pipeline
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.options import Restoration
from exactlyonce.engines.savepoints.contents import Saved, SavedOperator
from exactlyonce.engines.savepoints.restoring import fitting
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.sinks import KafkaSink


def count(state: int | None, record: bytes) -> tuple[int, bytes]:
    """How many there were."""
    return (state or 0) + 1, record


def graph() -> LogicalGraph:
    """Source `right` and operator `counts`."""
    pipeline = Pipeline("totals")
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

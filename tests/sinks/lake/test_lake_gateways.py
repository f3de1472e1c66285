"""A gateway between a lake sink and its catalog, or its bucket, repeats, delays and loses commits, or their answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from gateway import DELTA_COMMIT, ICEBERG_COMMIT, Fate, Gateway
from lake_hands import MODES, TOTALS, Hands, RestLake, StoredDelta, commit, totals

from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.lake.sink import LakeCommitter
from exactlyonce.testing.sink_contract.hooks import ORIGIN

for library in ("pyiceberg", "deltalake"):
    pytest.importorskip(library, reason="LAKES NOT TESTED: they need the extras `iceberg` and `delta`")

each_mode = pytest.mark.parametrize("mode", MODES)
each_fate = pytest.mark.parametrize("fate", Fate, ids=[fate.name.lower() for fate in Fate])


@pytest.fixture(params=["iceberg", "delta"])
def on_gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Hands, Gateway]]:
    """A table, and the gateway before it."""
    is_delta = request.param == "delta"
    server = request.getfixturevalue("s3" if is_delta else "rest")
    port, commits = (server.door.port, DELTA_COMMIT) if is_delta else (server.port, ICEBERG_COMMIT)
    with closing(Gateway(port, commits)) as gateway:
        folder = tmp_path / "lake"
        hands = StoredDelta(folder, server, gateway.url) if is_delta else RestLake(folder, server.uri, gateway.url)
        hands.create(TOTALS)
        yield hands, gateway
        hands.end()


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients wait for an answer for a second: no test depends on it, a silence only ends sooner."""
    from exactlyonce.sinks.delta import table
    from exactlyonce.sinks.iceberg import catalog

    monkeypatch.setattr(catalog, "ANSWER_TIMEOUT_S", 1)
    monkeypatch.setattr(table, "S3_LIMITS", {**table.S3_LIMITS, "timeout": "1s"})


def asked_again(act: Any) -> Any:
    """The result of *act*, which is done again while the store does not answer, as a leader does."""
    for _ in range(9):
        with suppress(StoreUnavailable):
            return act()
    return act()


def assert_readable(lake: Hands) -> None:
    """All files of every snapshot of a table of Iceberg are there."""
    if isinstance(lake, RestLake):
        for snapshot in lake.table().snapshots():
            lake.table().scan(snapshot_id=snapshot.snapshot_id).to_arrow()


@pytest.mark.exhaustive
@each_mode
@each_fate
def test_a_commit_comes_once(on_gateway: tuple[Hands, Gateway], fate: Fate, mode: str) -> None:
    """Its rows are in the table once, and so are those of the next, whatever became of the request or its answer."""
    lake, gateway = on_gateway
    lake.options |= MODES[mode]
    committer = lake.led()
    commit(committer, lake.staged(totals(1), 1))
    staged = lake.staged(totals(2), 2, previous=1)
    gateway.meet(fate)
    asked_again(lambda: commit(committer, staged))
    assert gateway.has_met
    kept = [] if mode == "upsert" else [("ann", 1)]
    assert lake.rows() == [*kept, ("ann", 2)]
    gateway.release()
    assert not commit(committer, staged)
    assert lake.rows() == [*kept, ("ann", 2)]
    kept = [] if mode == "upsert" else [*kept, ("ann", 2)]
    assert commit(committer, lake.staged(totals(3), 3, previous=2))
    assert lake.rows() == [*kept, ("ann", 3)]
    assert_readable(lake)


@pytest.mark.exhaustive
@each_fate
def test_a_fence_holds(on_gateway: tuple[Hands, Gateway], fate: Fate) -> None:
    """A newer leader's fence is one, whatever became of its request; what waits is committed by that leader."""
    lake, gateway = on_gateway
    older, staged = lake.led(1), lake.staged(totals(1), 1)
    newer = lake.committer()
    gateway.meet(fate)
    asked_again(lambda: newer.fence(2, ORIGIN))
    with pytest.raises(Exception, match="newer instance has taken over"):
        commit(older, staged)
    assert lake.rows() == []
    assert newer.commit([staged], 2, ORIGIN)
    gateway.release()
    assert lake.rows() == [("ann", 1)]
    assert_readable(lake)


@pytest.mark.exhaustive
def test_a_late_commit_of_a_dead_leader(on_gateway: tuple[Hands, Gateway]) -> None:
    """The gateway still has it when the next leader has fenced, and committed the same."""
    lake, gateway = on_gateway
    dead, staged = lake.led(1), lake.staged(totals(1), 1)
    gateway.meet(Fate.LATE)
    if isinstance(lake, RestLake):  # deltalake itself sends it again after a 504
        with pytest.raises(StoreUnavailable):
            commit(dead, staged)
    else:
        asked_again(lambda: commit(dead, staged))
    alive: LakeCommitter = lake.led(2)
    alive.commit([staged], 2, ORIGIN)
    gateway.release()
    assert lake.rows() == [("ann", 1)]
    assert not lake.led(3).commit([staged], 3, ORIGIN)
    assert lake.rows() == [("ann", 1)]
    assert_readable(lake)

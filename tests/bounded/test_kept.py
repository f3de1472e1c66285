"""What a process keeps from unit to unit: one producer of blocks, while units succeed, and frozen modules."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from exactlyonce.checkpoint.records.manifest import TopicInfo
from exactlyonce.engines.bounded.unit.kept import KeptByProcess
from exactlyonce.engines.processes import THRESHOLDS, UnitCollector
from exactlyonce.pipeline.errors import BrokerUnavailable

CLIENT = {"bootstrap.servers": "127.0.0.1:1"}
TOPIC = TopicInfo("p.checkpoints", "id", 5, 1)
collecting_rarely = UnitCollector.collecting_rarely
"""The real one: in other tests it does nothing."""


def taken(kept: KeptByProcess, client: dict[str, str] = CLIENT, topic: TopicInfo = TOPIC) -> Any:
    with kept.storage(client, topic, "") as storage:
        return storage


def test_a_storage_is_kept_for_units_of_the_same_topic_and_client() -> None:
    kept = KeptByProcess()
    first = taken(kept)
    assert taken(kept) is first
    assert taken(kept, {**CLIENT, "client.id": "other"}) is not first
    recreated = taken(kept, topic=TopicInfo("p.checkpoints", "new id", 5, 1))
    assert taken(kept, topic=TopicInfo("p.checkpoints", "new id", 5, 1)) is recreated
    kept.close()
    assert taken(kept, topic=TopicInfo("p.checkpoints", "new id", 5, 1)) is not recreated


def test_two_units_at_a_time_have_storages_of_their_own() -> None:
    kept = KeptByProcess()
    with kept.storage(CLIENT, TOPIC, "") as first, kept.storage(CLIENT, TOPIC, "") as second:
        assert first is not second
    assert taken(kept) in (first, second)


def test_a_unit_that_fails_passes_nothing_on() -> None:
    kept = KeptByProcess()
    first = taken(kept)
    with pytest.raises(BrokerUnavailable, match="not written"), kept.storage(CLIENT, TOPIC, "") as storage:
        raise BrokerUnavailable("a block was not written")
    assert storage is first
    assert taken(kept) is not first


def test_modules_are_frozen_once_and_the_garbage_of_units_is_collected() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            died.append(True)

    died: list[bool] = []
    before, collector = gc.get_threshold(), UnitCollector()
    try:
        with collecting_rarely(collector):
            assert gc.get_threshold() == THRESHOLDS
            frozen = gc.get_freeze_count()
            Cycle()
        assert gc.get_threshold() == before
        with collecting_rarely(collector):
            assert died == [True], "the unit before has left it"
            assert gc.get_freeze_count() <= frozen, "nothing was frozen meanwhile"
        collector.unfreeze()
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()  # as before: see the conftest of all tests

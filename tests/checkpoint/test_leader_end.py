"""The end of an incarnation: what its last record says, and what follows where there is none."""

from __future__ import annotations

import pytest

from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.leader_config import LeaderConfig
from exactlyonce.checkpoint.orphans import KnownBlocks
from exactlyonce.checkpoint.requests import KnownOutputs, drive
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.pipeline.errors import BrokerUnavailable
from tests.connectors.kafka.checkpoint_topic.conftest import RealLog, Store


def leader(store: Store, log: RealLog) -> Leader:
    config = LeaderConfig(
        pipeline=store.pipeline, host="here", process=1, cluster_id="", transaction_version=2,
        transaction_timeout_ms=60_000, fingerprint="", max_parallelism=1, parallelism=1, deletes=True,
    )  # fmt: skip
    return Leader(config, log, KnownBlocks(CheckpointSettings()), store.clock, lambda text: None)


def conclude(leader: Leader, log: RealLog, cancelled: str = "") -> None:
    drive(leader.conclude(cancelled), lambda ask: () if isinstance(ask, KnownOutputs) else log.perform(ask))


@pytest.mark.exhaustive
def test_a_cancellation_that_is_not_recorded(store: Store) -> None:
    first = store.living()
    first.appended(store.manifest(0))
    first.appended(store.mark(0))
    log = store.log()
    found = leader(store, log)
    log.do(found.open())
    found.resume(1)
    store.kafka.configure_topic(store.topic.name, max_message_bytes=10)
    while log.beaten() is Outcome.DONE:
        pass  # a broker takes to a setting a little later
    log.append_timeout_ms = 2_000
    with pytest.raises(BrokerUnavailable):
        conclude(found, log, "request")
    conclude(found, log)
    seen = store.seen()
    assert seen is not None
    assert not seen.condemned
    assert not seen.incarnations[1].ended

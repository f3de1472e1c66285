"""A copy of an aborted transaction that cannot be made whole leaves nothing open."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import TopicPartition

from exactlyonce.connectors.kafka.copying import copy_transaction
from exactlyonce.connectors.kafka.log import Log

pytestmark = pytest.mark.broker


def test_a_copy_whose_records_are_gone_is_aborted(cluster: Any, topic: str) -> None:
    """Records of the second partition were deleted after those of the first were copied: they hold nobody back."""
    cluster.open(topic, topic, [b"%d" % number for number in range(6)])
    lost = cluster.committable(topic)
    cluster.transactions.end_until_answered(topic, lost.producer_id, lost.epoch, commit=False)
    cluster.wait_until(lambda: cluster.transactions.describe([topic])[topic].state == "CompleteAbort")
    admin = cluster.kafka.admin()
    for each in admin.delete_records([TopicPartition(topic, 1, 1)]).values():
        each.result()
    log, name = Log(cluster.config), f"{topic}-repair"
    why = copy_transaction(cluster.config, cluster.transactions, log, lost, name, 600_000)
    log.close()
    assert isinstance(why, str)
    cluster.wait_until(lambda: cluster.transactions.describe([name])[name].state == "CompleteAbort")

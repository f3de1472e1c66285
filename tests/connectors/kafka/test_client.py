"""The use of the client library by the checkpoint store."""

from __future__ import annotations

import copy

from exactlyonce.checkpoint.block_storage import DamagedBlock
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.connectors.kafka.client import settings


def test_only_the_way_to_the_broker_is_taken_over() -> None:
    connection = {
        "bootstrap.servers": "a:1", "client.id": "me", "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN",
        "ssl.ca.location": "/ca.pem", "enable.ssl.certificate.verification": "true", "socket.timeout.ms": "5000",
        "metadata.max.age.ms": "1000",
    }  # fmt: skip
    tuning = {
        "acks": "0", "auto.offset.reset": "earliest", "compression.type": "lz4", "delivery.timeout.ms": "1",
        "group.id": "mine", "linger.ms": "500", "message.max.bytes": "1000", "queue.buffering.max.messages": "1",
        "transactional.id": "mine",
    }  # fmt: skip
    assert settings(connection | tuning, linger_ms=0) == connection | {"linger.ms": 0}


def test_damage_travels_between_processes() -> None:
    ref = BlockRef(1, 2, "block/1/1/totals/0/0/0-ab", 3, b"x" * 32)
    told = copy.copy(DamagedBlock("Block is gone.", ref))  # as pickling does it
    assert (type(told), str(told), told.ref) == (DamagedBlock, "Block is gone.", ref)

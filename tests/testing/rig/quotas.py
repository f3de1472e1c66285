"""A broker's quotas of one client id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kafka.protocol.admin.client_quotas import AlterClientQuotasRequest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import Wire
from exactlyonce.testing.cluster import LIMIT_S


@contextmanager
def quota(servers: str, client_id: str, **quotas: float) -> Iterator[None]:
    """`quota(servers, "me", producer_byte_rate=10_000)` until the end."""
    wire = Wire(ClientConfig({"bootstrap.servers": servers}), timeout_ms=int(LIMIT_S * 1000))
    try:
        _alter(wire, client_id, quotas, remove=False)
        yield
        _alter(wire, client_id, quotas, remove=True)
    finally:
        wire.close()


def _alter(wire: Wire, client_id: str, quotas: dict[str, float], *, remove: bool) -> None:
    entry = AlterClientQuotasRequest.EntryData
    entity = [entry.EntityData(entity_type="client-id", entity_name=client_id)]
    changes = [entry.OpData(key=name, value=value, remove=remove) for name, value in quotas.items()]
    answer = wire.ask(AlterClientQuotasRequest(entries=[entry(entity=entity, ops=changes)], validate_only=False))
    assert [each.error_code for each in answer.entries] == [0]

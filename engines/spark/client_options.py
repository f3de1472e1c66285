"""The options of a read or a write that are settings of its Kafka client: `kafka.NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exactlyonce.connectors.kafka.client_config import ClientConfig

KAFKA = "kafka."


def client_settings_in(options: Mapping[str, str]) -> dict[str, str]:
    """The settings of librdkafka in *options*, whose names are in their normal form.

    >>> client_settings_in({"subscribe": "orders", "kafka.client.id": "report"})
    {'client.id': 'report'}
    """
    return {name[len(KAFKA) :]: value for name, value in options.items() if name.startswith(KAFKA)}


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """The common part of parsed options."""

    client_settings: Mapping[str, str] = field(repr=False)

    def client(self) -> ClientConfig:
        """The client's configuration, made where it is used, so that no resolved secret travels."""
        return ClientConfig(self.client_settings)

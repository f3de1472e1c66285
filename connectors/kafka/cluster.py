"""A Kafka cluster that a source reads, beside the one that holds the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import name_problem

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.client_config import ClientConfig


@dataclass(frozen=True)
class Cluster:
    """Another cluster than that of the checkpoints: ``Cluster("eu", {"bootstrap.servers": "eu-1:9092"})``.

    - *name* stands for it in checkpoints and errors, as ``kafka:eu/orders``. Addresses may change, the name may not.
    - *settings*: librdkafka's, as of the cluster of the checkpoints. Secrets are given by reference, as ``env:NAME`` or
      ``file:/path``; ``bootstrap.servers`` may be.
    """

    name: str
    settings: Mapping[str, Any] = field(repr=False)

    @cached_property
    def client(self) -> ClientConfig:
        """How to reach it. Raises `ConfigError` for settings that no client takes."""
        from exactlyonce.connectors.kafka.client_config import ClientConfig  # descriptions import no client library

        return ClientConfig(self.settings)

    def place(self, topic: str) -> str:
        """The `SourceOffset.topic` of *topic* here.

        >>> Cluster("eu", {}).place("orders")
        'kafka:eu/orders'
        """
        return f"kafka:{self.name}/{topic}"

    def problems(self) -> Iterator[str]:
        """The mistakes in it, each with its remedy."""
        if problem := name_problem(self.name):
            yield f"cluster: {problem}"
        try:
            written_out = self.client.secrets_written_out
        except ConfigError as error:
            yield f"cluster {self.name!r}: {error}"
            return
        if written_out:
            yield (
                f"cluster {self.name!r} has {', '.join(written_out)} written out: put it into a variable, as "
                f'"env:NAME", or into a file, as "file:/path"'
            )

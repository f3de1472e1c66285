"""Codecs with a schema registry, opened for the keys or values of a topic.

`client` asks a registry by Confluent's client, and checks its settings; `codec` has the wire format. No other folder of
`connectors` is imported.
"""

from exactlyonce.connectors.registry.client import problems
from exactlyonce.connectors.registry.codec import (
    OpenedCodec,
    all_bytes_of,
    bytes_of,
    check_reading,
    check_writing,
    opened,
)

__all__ = ["OpenedCodec", "all_bytes_of", "bytes_of", "check_reading", "check_writing", "opened", "problems"]

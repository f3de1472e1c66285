"""Codecs with a schema registry, opened for the keys or values of a topic.

`settings` are of Confluent's client, by which `client` asks a registry; `codec` has the wire format. No other folder of
`connectors` is imported.
"""

from exactlyonce.connectors.registry.codec import all_bytes_of, bytes_of, check_reading, check_writing, opened
from exactlyonce.connectors.registry.settings import problems

__all__ = ["all_bytes_of", "bytes_of", "check_reading", "check_writing", "opened", "problems"]

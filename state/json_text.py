"""States and keys as JSON for people and for text columns: any msgpack value, with nothing left out.

Invariant: a dict stays an object. A key without a JSON name, as a tuple, is named by its own JSON text.
"""

from __future__ import annotations

from typing import Any

import msgspec


def json_text(value: Any) -> str:
    """A msgpack value as JSON.

    >>> json_text({"sum": 3, 7: 1}), json_text({("ann", 1): [3], None: []})
    ('{"sum":3,"7":1}', '{"[\\\\"ann\\\\",1]":[3],"null":[]}')
    """
    try:
        return msgspec.json.encode(value).decode()
    except TypeError:  # of one of its keys, wherever that is
        return msgspec.json.encode(_named(value)).decode()


def _named(value: Any) -> Any:
    """*value*, with a text in place of every key without a JSON name."""
    if isinstance(value, dict):
        return {_name(key): _named(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_named(inner) for inner in value]
    return value


def _name(key: Any) -> Any:
    return json_text(key) if key is None or isinstance(key, bool | list | tuple) else key

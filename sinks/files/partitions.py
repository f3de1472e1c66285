"""Partitioned folders as Hive names them: `day=2026-11-22/customer=A%2FB/`.

Invariant: two values of a field never get one name, so that a reader gets each value back from the folder's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

from exactlyonce.pipeline.columns import RowField, kind_name
from exactlyonce.pipeline.shape import Form

NONE = "__HIVE_DEFAULT_PARTITION__"
"""The value of None in a folder's name."""
KINDS = {Form.STR, Form.INT, Form.BOOL, Form.DATE, Form.UUID}
NAME_BYTES_MAX = 255
"""The limit of a file name on common file systems."""
PATH_BYTES_MAX = 4095
"""The system's limit of a path."""

_ESCAPED = re.compile(r'[\x00-\x1f\x7f"#%\'*/:=?\\{\[\]^]')
"""The characters that Hive escapes."""


def problems(partition_by: Sequence[str], fields: Sequence[RowField]) -> Iterator[str]:
    """The problems of these fields as partitions, each as a sentence."""
    known = {field.name: field for field in fields}
    for name in partition_by:
        field = known.get(name)
        if field is None:
            yield f"partition_by names {name!r}, which is no field of the record: it has {', '.join(known)}"
        elif field.kind not in KINDS:
            kind, kinds = kind_name(field.kind), ", ".join(sorted(map(kind_name, KINDS)))
            yield f"partition_by names {name!r}, a field of {kind}: a folder can be named after {kinds}"
        elif name.startswith(("_", ".")):
            yield f"partition_by names {name!r}: readers skip folders that begin with _ or a dot: rename the field"
    if partition_by and set(partition_by) == set(known):
        yield "partition_by names all fields, and nothing would be left for the files: leave one out"


def escaped(text: str) -> str:
    """*text* as a part of a folder's name.

    >>> escaped("a/b=ü")
    'a%2Fb%3Dü'
    """
    return _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", text)


def folder_names(field: RowField, records: Sequence[Any]) -> list[str]:
    """The folder's name for each record. ValueError or TypeError for a value that cannot be in a name."""
    prefix = escaped(field.name)
    values = field.values(records)
    names = {value: f"{prefix}={_text(field, value)}" for value in set(values)}
    return [names[value] for value in values]


def _text(field: RowField, value: Any) -> str:
    if value is None:
        if not field.nullable:
            raise ValueError(f"{field.name}: None, which the type does not admit")
        return NONE
    text = _written(value)
    if text in ("", NONE):
        raise ValueError(f"{field.name}: {text!r} cannot be told from None in a folder's name")
    text = escaped(text)
    if len(f"{escaped(field.name)}={text}".encode()) > NAME_BYTES_MAX:
        raise ValueError(f"{field.name}: a value of {len(text)} characters is too long for a folder's name")
    return text


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, date) else str(value)


def grouped(fields: Sequence[RowField], records: Sequence[Any], target: str) -> dict[str, Sequence[Any]]:
    """*records* by folder below *target*, each group in its order; without *fields*, all in ""."""
    if not fields:
        return {"": records}
    names = zip(*(folder_names(field, records) for field in fields), strict=True)
    groups: dict[tuple[str, ...], list[Any]] = {}
    for name, record in zip(names, records, strict=True):
        groups.setdefault(name, []).append(record)
    folders: dict[str, Sequence[Any]] = {"/".join(name): group for name, group in groups.items()}
    room = PATH_BYTES_MAX - NAME_BYTES_MAX - len("//") - len(os.fsencode(target))
    size = max((len(folder.encode()) for folder in folders), default=0)
    if size > room:
        shown = ", ".join(field.name for field in fields)
        raise ValueError(f"{shown}: together they make a folder's path of {size:,} bytes, and {room:,} have room here")
    return folders

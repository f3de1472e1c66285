"""Sizes and counts, in text "512mb", "1.5gb", "64kb" or a number of bytes; a kilobyte is 1,024 bytes."""

from __future__ import annotations

import re

from exactlyonce.pipeline.errors import ConfigError

Size = str | int
"""A text as "512mb", or a number of bytes."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(b|kb|mb|gb|tb|)\Z")
_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


def byte_count(size: Size, name: str = "size") -> int:
    """Bytes of a size.

    >>> byte_count("1.5kb")
    1536
    """
    is_size = isinstance(size, str | int) and not isinstance(size, bool)
    match = _SIZE.match(str(size).strip().lower()) if is_size else None
    if match is None:
        raise ConfigError(f"{name} is {size!r}: write a number with a unit, as 64kb, 512mb or 2gb, or of bytes.")
    return int(float(match[1]) * _UNITS[match[2]])


def size_problems(size: Size, name: str, *, least: int = 1) -> list[str]:
    """The mistake in *size*, of the argument *name*, with its remedy; it has *least* bytes at least.

    >>> size_problems("128mb", "roll_bytes"), size_problems(0, "roll_bytes")
    ([], ['roll_bytes=0 must be 1b or more: "128mb", or a number of bytes'])
    """
    try:
        if byte_count(size, name) >= least:
            return []
    except ConfigError as error:
        return [str(error).removesuffix(".")]
    return [f'{name}={size!r} must be {written_size(least)} or more: "128mb", or a number of bytes']


def written_size(count: int) -> str:
    """A size as `byte_count` reads it.

    >>> written_size(512 << 20), written_size(1000)
    ('512mb', '1000b')
    """
    unit = next(unit for unit, size in reversed(_UNITS.items()) if unit and count % size == 0) if count else "b"
    return f"{count // _UNITS[unit]}{unit}"


def shown_bytes(count: int) -> str:
    """A size for people.

    >>> shown_bytes(384), shown_bytes(1536), shown_bytes(3 << 30)
    ('384 B', '1.5 kB', '3.0 GB')
    """
    shown, units = float(count), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while shown >= 1024 and unit != "TB":
        shown, unit = shown / 1024, next(units)
    return f"{shown:.1f} {unit}" if unit != "B" else f"{count} B"


def is_count(value: object, least: int = 1, most: int | None = None) -> bool:
    """Whether *value* is an integer from *least* on, up to *most*; True and False are none.

    >>> is_count(7), is_count(0), is_count(True), is_count(9, most=8)
    (True, False, False, False)
    """
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return least <= value and (most is None or value <= most)


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "record"), counted(2_000, "record")
    ('1 record', '2,000 records')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"

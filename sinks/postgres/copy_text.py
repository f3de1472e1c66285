r"""Rows as lines of PostgreSQL's COPY text: tabs between values, `\N` for NULL, a backslash before special characters.

Pure. A line begins with the mark of the columns that it was written for, which is checked and removed before it is
sent. Invariants: a newline stands only at the end of a line; values that the column would refuse or change are refused
here, with the name of the field, as far as the column's type tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, Inexact, InvalidOperation
from hashlib import sha256
from itertools import repeat
from math import isfinite
from typing import Any
from uuid import UUID

import msgspec

from exactlyonce.pipeline.codec import require_finite
from exactlyonce.pipeline.columns import RowField, kind_name, shown
from exactlyonce.pipeline.shape import Form
from exactlyonce.sinks.sql.fields import ColumnTexts

MARK_BYTES = 8
"""ASCII characters before each line."""
INDEXED_BYTES_MAX = 2600
"""In the texts and bytes of a key: an entry of a btree has 2,704, and other columns of the key are short."""

Texts = Callable[[list[Any]], Sequence[str]]
"""Converts values of a column, none of them None, to text; ValueError if the column would refuse one."""

_FLOAT4_MAX = 3.4028235677973366e38
"""The least number that is infinite as a real: its largest value and half a step."""
_FLOAT2_MAX = 65519.998046875
"""The least number that is infinite in two bytes, once it is rounded to four."""
_FLOAT4_MIN = 2.0**-150
"""The largest number that is zero as a real."""
VECTOR_MAX = 16_000
"""The dimensions of a vector of pgvector."""
_OFFSET_MAX = timedelta(hours=15)
_NULL_CHARACTER = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class CopyEncoder:
    """Encodes records as marked lines."""

    def __init__(
        self, columns: Sequence[ColumnTexts], mark: str, indexed: Collection[str] = (), ending: str = ""
    ) -> None:
        """*indexed*: the names of the columns in a unique index. *ending*: of each line, with a tab."""
        self._columns = columns
        self._mark = mark
        self._ending = ending
        self._indexed = [
            column for column in columns
            if column.field.name in indexed and column.field.kind in (Form.STR, Form.BYTES)
        ]  # fmt: skip

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        """A line for each record, its newline included."""
        if not records:
            return []
        columns = [column.encode(records) for column in self._columns]
        if self._indexed:
            self._require_that_an_index_holds(records)
        lines = f"{self._ending}\n{self._mark}".join(map("\t".join, zip(*columns, strict=True)))
        return f"{self._mark}{lines}{self._ending}\n".encode().splitlines(keepends=True)

    def _require_that_an_index_holds(self, records: Sequence[Any]) -> None:
        sizes = [list(map(_size, column.field.values(records))) for column in self._indexed]
        size = max(map(sum, zip(*sizes, strict=True)))
        if size > INDEXED_BYTES_MAX:
            names = ", ".join(column.field.name for column in self._indexed)
            raise ValueError(
                f"{names}: a key of {size:,} bytes is longer than the {INDEXED_BYTES_MAX:,} that an index "
                f"holds in any case: take a shorter one, or a digest of it (table {self._indexed[0].table})"
            )


def _size(value: str | bytes) -> int:
    return len(value) if isinstance(value, bytes) or value.isascii() else len(value.encode())


def mark_of(mode: str, key: Sequence[str], fields: Sequence[RowField], meanings: Sequence[Any]) -> str:
    """The mark of lines for these columns, each with its `catalogue.meaning`, in this mode."""
    kinds = [(field.name, kind_name(field.kind), kind_name(field.item) if field.item else "") for field in fields]
    return sha256(msgspec.json.encode(("copy text 2", mode, key, kinds, meanings))).hexdigest()[:MARK_BYTES]


def unmarked(chunk: bytes, mark: bytes) -> bytes | None:
    """The lines of *chunk* without marks; None if one has another mark, or the last one no end."""
    if not chunk:
        return b""
    lines = chunk[len(mark) :].replace(b"\n" + mark, b"\n")
    marks = (len(chunk) - len(lines)) // len(mark)
    return lines if chunk.startswith(mark) and chunk.endswith(b"\n") and lines.count(b"\n") == marks else None


def escape(texts: Sequence[str]) -> list[str]:
    """Each text with a backslash before COPY's special characters. Refuses the null character."""
    joined = "\0".join(texts)
    if joined.count("\0") != len(texts) - 1:
        text = next(text for text in texts if "\0" in text)
        raise ValueError(f"{shown(text)} has a null character, which PostgreSQL does not store")
    if not joined.isascii():
        _refuse_surrogates(joined, texts)
    escaped = joined.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
    return list(texts) if len(escaped) == len(joined) else escaped.split("\0")


def _refuse_surrogates(joined: str, texts: Sequence[str]) -> None:
    try:
        joined.encode()
    except UnicodeEncodeError:
        text = next(text for text in texts if re.search("[\ud800-\udfff]", text))
        raise ValueError(f"{shown(text)} has half a character (a lone surrogate), which is no text") from None


def integers(low: int, high: int) -> Texts:
    """Integers from *low* to *high*."""

    def texts(values: list[int]) -> list[str]:
        for value in (min(values), max(values)):
            if not low <= value <= high:
                raise ValueError(f"{shown(value)} is out of range, {low} to {high}")
        return _encode_json(values).decode()[1:-1].split(",") if machine else list(map(str, values))

    machine = low >= -(1 << 63) and high < 1 << 63  # msgspec writes them all in less than half the time
    return texts


def booleans(values: list[bool]) -> list[str]:
    """True and false."""
    return ["t" if value else "f" for value in values]


def doubles(values: list[float]) -> list[str]:
    """Floats, none of which the column would change."""
    return list(map(repr, values))


def reals(values: list[float]) -> list[str]:
    """Floats for four bytes: too large or too small ones are refused, and digits are lost."""
    for value in values:
        size = abs(value)
        if (_FLOAT4_MAX <= size < float("inf")) or 0 < size <= _FLOAT4_MIN:
            raise ValueError(f"{value!r} is out of range for four bytes")
    return list(map(repr, values))


def decimals(precision: int | None, scale: int) -> Texts:
    """Decimals that the column holds as they are; *precision* None: any number of digits."""
    if precision is None:
        return _any_decimals
    step = Decimal(1).scaleb(-scale)
    context = Context(prec=precision, traps=[Inexact, InvalidOperation])

    def texts(values: list[Decimal]) -> list[str]:
        if all(map(Decimal.is_finite, values)):
            with suppress(Inexact, InvalidOperation):
                return list(map(str, map(context.quantize, values, repeat(step))))
        return [_fitted(value, precision, scale, context) for value in values]

    return texts


def _fitted(value: Decimal, precision: int, scale: int, context: Context) -> str:
    if value.is_qnan():
        return "NaN"
    try:
        return str(context.quantize(value, Decimal(1).scaleb(-scale)))
    except (Inexact, InvalidOperation):
        fits = f"{precision - scale} digits before the point and {scale} after it"
        raise ValueError(f"{shown(value)} does not fit {fits}: round it") from None


def _any_decimals(values: list[Decimal]) -> list[str]:
    if all(map(Decimal.is_finite, values)) and all(-8000 < value.adjusted() < 131072 for value in values):
        texts = list(map(str, values))
        if max(map(len, texts)) < 8000:  # so few digits do not reach the 16,383rd after the point
            return texts
    return [_any_decimal(value) for value in values]


def _any_decimal(value: Decimal) -> str:
    if value.is_qnan():
        return "NaN"
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or value.adjusted() >= 131072 or exponent < -16383:
        raise ValueError(f"{shown(value)} is no number that numeric holds")
    return str(value)


def strings(limit: int | None, padded: bool = False) -> Texts:
    """Text of at most *limit* characters. *padded*: the column ignores blanks at the end."""

    def texts(values: list[str]) -> list[str]:
        if limit is not None and max(map(len, values)) > limit:
            value = max(values, key=len)
            raise ValueError(f"{shown(value)} has {len(value)} characters, and {limit} fit")
        if padded and (blank := next((value for value in values if value.endswith(" ")), None)) is not None:
            raise ValueError(f"{shown(blank)} ends with a blank, which char drops: use varchar or text")
        return values

    return texts


def labels(known: Sequence[str]) -> Texts:
    """Text that is one of an enum's labels."""

    def texts(values: list[str]) -> list[str]:
        if unknown := sorted(set(values).difference(known)):
            raise ValueError(f"{shown(unknown[0])} is none of its labels, {', '.join(known)}")
        return values

    return texts


def binary(values: list[bytes]) -> list[str]:
    """Bytes, in hexadecimal."""
    return [f"\\x{value.hex()}" for value in values]


def timestamps(aware: bool, digits: int) -> Texts:
    """Timestamps with a time zone, or without one; *digits* of a second's fraction are kept."""
    fits = _fraction(digits)

    def texts(values: list[datetime]) -> list[str]:
        offsets = set(map(datetime.utcoffset, values))
        if aware and None in offsets:
            value = next(value for value in values if value.utcoffset() is None)
            raise ValueError(f"{value.isoformat()} has no time zone: give it one, datetime(..., tzinfo=timezone.utc)")
        if not aware and offsets != {None}:
            value = next(value for value in values if value.utcoffset() is not None)
            raise ValueError(f"{value.isoformat()} has a time zone, which would be lost: use timestamptz")
        fits(values)
        if any(offset and (abs(offset) > _OFFSET_MAX or offset % timedelta(minutes=1)) for offset in offsets):
            values = [value.astimezone(timezone.utc) for value in values]
        return list(map(datetime.isoformat, values))

    return texts


def times(digits: int) -> Texts:
    """Times of the day, without a zone."""
    fits = _fraction(digits)

    def texts(values: list[time]) -> list[str]:
        for value in values:
            if value.tzinfo is not None:
                raise ValueError(f"{value.isoformat()} has a time zone, which would be dropped")
        fits(values)
        return list(map(time.isoformat, values))

    return texts


def _fraction(digits: int) -> Callable[[Sequence[datetime | time]], None]:
    step = 10 ** (6 - digits)

    def fits(values: Sequence[datetime | time]) -> None:
        for value in values if step > 1 else ():
            if value.microsecond % step:
                raise ValueError(f"{value.isoformat()} has more than {digits} digits after the second: round it")

    return fits


def dates(values: list[date]) -> list[str]:
    """Days."""
    return list(map(date.isoformat, values))


def intervals(values: list[timedelta]) -> list[str]:
    """Spans of days, seconds and microseconds."""
    return [f"{value.days} days {value.seconds}.{value.microseconds:06} seconds" for value in values]


def uuids(values: list[UUID]) -> list[str]:
    """UUIDs."""
    return list(map(str, values))


_encode_json = msgspec.json.Encoder().encode


def json_text(binary_form: bool) -> Texts:
    """Values as JSON; *binary_form* is jsonb, which holds no null character."""

    def texts(values: list[Any]) -> list[str]:
        encoded = list(map(_encode_json, values))
        for value, text in zip(values, encoded, strict=True):
            require_finite(value, text)
            if binary_form and b"\\u0000" in text and _NULL_CHARACTER.search(text):
                raise ValueError(f"{shown(value)} has a null character, which jsonb does not store")
        return [text.decode() for text in encoded]

    return texts


def arrays(items: Texts) -> Texts:
    """Lists, whose values *items* converts."""

    def array(values: list[Any]) -> str:
        present = [value for value in values if value is not None]
        texts = iter(items(present) if present else ())
        quoted = ("NULL" if value is None else _quoted(next(texts)) for value in values)
        return f"{{{','.join(quoted)}}}"

    return lambda values: list(map(array, values))


def vectors(dimensions: int | None, half: bool = False) -> Texts:
    """Lists of floats as vectors of pgvector, whose numbers have four bytes, or with *half* two; *dimensions* None: any
    number of them."""
    infinite = _FLOAT2_MAX if half else _FLOAT4_MAX

    def vector(value: list[Any]) -> str:
        if len(value) != dimensions and (dimensions is not None or not 0 < len(value) <= VECTOR_MAX):
            fit = f"1 to {VECTOR_MAX:,}" if dimensions is None else f"{dimensions:,}"
            raise ValueError(f"{shown(value)} has {len(value):,} dimensions, and {fit} fit")
        if None in value or not all(map(isfinite, value)):
            wrong = next(number for number in value if number is None or not isfinite(number))
            raise ValueError(f"{wrong!r} is in it, at place {value.index(wrong)}, which a vector does not hold")
        if (size := max(map(abs, value))) >= infinite:
            raise ValueError(f"a number of the size {size!r} is in it, which is out of the column's range")
        return _encode_json(value).decode()

    return lambda values: list(map(vector, values))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

"""The names of partitions' folders."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import date
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pytest

from exactlyonce.pipeline.columns import fields_of
from exactlyonce.sinks.files import partitions


class Shop(Enum):
    NORTH = 1


def names(type_: Any, *values: Any) -> list[str]:
    record = msgspec.defstruct("Made", [("it", type_)])
    return partitions.folder_names(fields_of(record)[0], [record(value) for value in values])


@pytest.mark.parametrize(
    ("type_", "value", "name"),
    [
        (str, "plain text", "it=plain text"),
        (str, "a/b", "it=a%2Fb"),
        (str, "../..", "it=..%2F.."),
        (str, "x=1:%", "it=x%3D1%3A%25"),
        (str, "\x00\n", "it=%00%0A"),
        (str, "übergröße 日", "it=übergröße 日"),
        (str | None, None, "it=__HIVE_DEFAULT_PARTITION__"),
        (int, -5, "it=-5"),
        (bool, True, "it=true"),
        (date, date(2026, 11, 22), "it=2026-11-22"),
        (UUID, UUID(int=1), "it=00000000-0000-0000-0000-000000000001"),
        (Shop, Shop.NORTH, "it=1"),
    ],
)
def test_values_are_written_as_hive_does(type_: Any, value: Any, name: str) -> None:
    assert names(type_, value, value) == [name, name]


@pytest.mark.parametrize(
    ("type_", "value", "reason"),
    [
        (str, "", "it: '' cannot be told from None"),
        (str, "__HIVE_DEFAULT_PARTITION__", "cannot be told from None"),
        (str, "x" * 300, "it: a value of 300 characters is too long"),
        (str, "ü" * 127, "too long"),
        (str, None, "it: None, which the type does not admit"),
        (str, "\ud800", "surrogates not allowed"),
        (int, "1", "it: '1' is str, not int"),
    ],
)
def test_a_value_without_a_name_is_the_records_fault(type_: Any, value: Any, reason: str) -> None:
    """A value that a reader could not find again from the folder's name is refused."""
    with pytest.raises((ValueError, TypeError), match=reason):
        names(type_, value)


def test_groups_keep_the_order_of_rows() -> None:
    record = msgspec.defstruct("Made", [("a", int), ("b", str), ("c", int)])
    fields = fields_of(record)[:2]
    records = [record(each % 2, "x", each) for each in range(6)]
    found = {name: [each.c for each in group] for name, group in partitions.grouped(fields, records, "/target").items()}
    assert found == {"a=0/b=x": [0, 2, 4], "a=1/b=x": [1, 3, 5]}


def test_values_that_together_make_too_long_a_path_are_the_records_fault() -> None:
    """Each fits alone; the system refuses the whole path."""
    record = msgspec.defstruct("Made", [(f"f{number}", str) for number in range(16)])
    fields, target = fields_of(record), "/" + "t" * 9
    for size, fits in ((249, True), (250, False)):
        records = [record(*["short"] * 16), record(*["x" * 234] * 15, "x" * size)]
        with nullcontext() if fits else pytest.raises(ValueError, match=r"f0, f1, .*: together .* of 3,8\d\d bytes"):
            groups = partitions.grouped(fields, records, target)
            path = f"{target}/{max(groups, key=len)}/{'n' * partitions.NAME_BYTES_MAX}"
            with pytest.raises(FileNotFoundError):  # and not that the name is too long
                os.stat(path)


@pytest.mark.parametrize(
    ("type_", "by", "problem"),
    [
        ([("a", float), ("b", int)], "a", "a folder can be named after"),
        ([("_a", int), ("b", int)], "_a", "readers skip folders that begin with _"),
    ],
)
def test_fields_that_name_no_folder_are_problems(type_: Any, by: str, problem: str) -> None:
    (found,) = partitions.problems((by,), fields_of(msgspec.defstruct("Made", type_)))
    assert problem in found

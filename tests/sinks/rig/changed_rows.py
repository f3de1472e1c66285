"""Changes of a table by chance, and the rows that they leave, as a dict of them has these."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from exactlyonce.pipeline.changes import Change, Op
from exactlyonce.pipeline.records import Record

_texts = msgspec.json.Decoder(tuple[str, ...]).decode


class Item(msgspec.Struct, frozen=True):
    shop: str
    id: int
    name: str = ""
    note: str | None = None


def change(op: Op, key: Any, after: Any = None) -> Change[Any]:
    return Change(op, key, after, None, "items", 1, 1)


def key_of(item: Item, key: Sequence[str]) -> Any:
    """The key as a source of changes has it."""
    values = [getattr(item, name) for name in key]
    return values[0] if len(values) == 1 else msgspec.json.encode(list(map(str, values))).decode()


def changes(
    chance: random.Random, key: Sequence[str], intervals: int, size: int, left: Mapping[Any, Item]
) -> Iterator[list[Change[Any]]]:
    """Lists of *size* changes; many are of the same keys, and bring back what was deleted."""
    rows, number = dict(left), 0
    for _ in range(intervals):
        made: list[Change[Any]] = []
        while len(made) < size:
            number += 1
            id, shop = chance.randrange(80), chance.choice(["a", "B'\\\t", "é\n"])
            item = Item(shop, id, f"{number}\f,'", chance.choice([None, "x"]))
            of = key_of(item, key)
            if of not in rows:
                rows[of] = item
                made.append(change(chance.choice(["read", "insert"]), of, item))
            elif chance.random() < 0.6:
                del rows[of]
                made.append(change("delete", of))
            else:
                rows[of] = item
                made.append(change("update", of, item))
        yield made


def as_records(made: Sequence[Change[Any]]) -> list[Record[Any]]:
    """*made* as records of a table: the value None deletes, and a key of several columns is a tuple."""
    return [Record(each.after, each.key if isinstance(each.key, int) else (*_texts(each.key),)) for each in made]


def applied(rows: Mapping[Any, Item], made: Sequence[Change[Any]]) -> dict[Any, Item]:
    """*rows* after these changes, one after the other."""
    after = dict(rows)
    for each in made:
        after.pop(each.key, None)
        if each.after is not None:
            after[each.key] = each.after
    return after

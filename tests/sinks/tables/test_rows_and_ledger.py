"""What each mode makes of rows, beside what `StoreContract` asks of every store."""

from __future__ import annotations

import msgspec
import pytest
from table_stores import Tables, Total, entry

from exactlyonce.pipeline.errors import Fenced


def test_the_last_row_of_a_key_wins(tables: Tables) -> None:
    """Within a chunk, over chunks and over checkpoints, wide or narrow; a key in another case is another."""
    store = tables.ready("upsert")
    names = ["Ann", "ann", "bob", "x" * 200, *(["y" * 2500] if tables.name == "postgres" else [])]
    encoded = store.encoder().encode([Total(name, turn) for turn in range(300) for name in names])
    assert store.apply([b"".join(encoded[at : at + 100]) for at in range(0, len(encoded), 100)], entry(1))
    assert tables.totals() == sorted((name, 299) for name in names)
    assert store.apply(store.encoder().encode([Total("Ann", 9), Total("Ann", 7), Total("cy", 8)]), entry(2))
    assert [row for row in tables.totals() if row[1] != 299] == [("Ann", 7), ("cy", 8)]


def test_an_upsert_of_nothing_but_a_key(tables: Tables) -> None:
    """Where the key is all that a record has, a row that is there stays as it is."""
    store = tables.of(Total, create=True, mode="upsert", key=("cents", "customer"))
    store.check()
    rows = [Total("ann", 1), Total("ann", 1), Total("ann", 2)]
    for _ in range(2):
        store.write(store.encoder().encode(rows))
    assert tables.totals() == [("ann", 1), ("ann", 2)]


class Order(msgspec.Struct):
    shop: int
    customer: str
    note: str | None = None


@pytest.mark.parametrize("key", [("shop", "customer"), ("customer",), ("shop",)], ids="-".join)
def test_a_delete_removes_the_rows_of_its_keys(tables: Tables, key: tuple[str, ...]) -> None:
    """One key, or thousands, of one column or more; nothing else is removed, and what is not there is no error."""
    everything = [(n // 40, f"c{n}") for n in range(2000)]
    tables.sql("CREATE TABLE totals (shop bigint, customer varchar(20), note text)")
    tables.sql("CREATE INDEX by_key ON totals (shop, customer)")
    tables.sql("INSERT INTO totals VALUES " + ", ".join(f"({shop}, '{customer}', '')" for shop, customer in everything))
    store = tables.of(Order, mode="delete", key=key)
    gone: set[tuple[object, ...]] = set()
    for removed in ([], everything[:1], [*everything[100:1500], (99, "nobody")]):
        store.write([b"".join(store.encoder().encode([Order(*row) for row in removed]))])
        gone |= {tuple(getattr(Order(*row), name) for name in key) for row in removed}
    left = [row for row in everything if tuple(getattr(Order(*row), name) for name in key) not in gone]
    assert sorted(tables.sql("SELECT shop, customer FROM totals")) == sorted(left)


def test_an_older_incarnation_is_told_which_has_taken_over(tables: Tables) -> None:
    zombie, newer = tables.ready(), tables.store()
    newer.fence("p", "s", 3, "topic-1")
    with pytest.raises(Fenced, match=r"has incarnation 3: .*from incarnation 1"):
        zombie.apply(tables.chunks(zombie), entry(1))

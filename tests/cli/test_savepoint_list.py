"""`exactlyonce savepoints list` for people."""

from __future__ import annotations

import msgspec

from exactlyonce.checkpoint.records.manifest import Manifest, OperatorSnapshot, SourceOffset
from exactlyonce.cli.commands.savepoints import as_text


def savepoint(number: int, partitions: int) -> Manifest:
    """One of a pipeline with two sources."""
    offsets = [SourceOffset("orders", "shop.orders.v2", "id", each, 184_467_440 + each) for each in range(partitions)]
    offsets.append(SourceOffset("rates", "exchange-rates", "id", 0, 5))
    blank = Manifest(
        pipeline="order-totals", checkpoint=number, incarnation=3, attempt=0, kind="savepoint", base=0, previous=0,
        triggered_at_ms=1_000_000, completed_at_ms=1_000_113, fingerprint="f", max_parallelism=128, parallelism=1,
        block_partitions=5, block_end_offsets=(), written_bytes=0, offsets=(), operators=(), order_logs=(),
        committables=(), sinks=(),
    )  # fmt: skip
    operators = tuple(OperatorSnapshot(each, 1, 3 << 29, ()) for each in ("totals", "names"))
    return msgspec.structs.replace(blank, offsets=tuple(offsets), operators=operators)


def test_it_fits() -> None:
    """Into 100 columns, with Sn of every partition below its savepoint; and says which are decided only."""
    some = [savepoint(98_417, 12), savepoint(98_502, 12)]
    header, *lines = as_text(some, {98_417}, 100)
    assert header == "   id  state      completed            state size"
    assert max(map(len, [header, *lines])) <= 100
    rows = [line.split() for line in lines if line.startswith("98")]
    assert [(row[0], row[1], *row[-2:]) for row in rows] == [
        ("98417", "finalized", "3.0", "GB"), ("98502", "decided", "3.0", "GB"),
    ]  # fmt: skip
    shown = " ".join(lines).split()
    for each in some[0].offsets:
        assert shown.count(f"{each.topic}[{each.partition}]={each.offset}") == len(some)
    assert [line.strip()[:14] for line in lines if "Sn of" in line] == ["Sn of orders  ", "Sn of rates   "] * 2

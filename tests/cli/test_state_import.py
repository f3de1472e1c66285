"""`exactlyonce state import`: rows become a savepoint, from which a run goes on."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, TopicPartition

from exactlyonce.cli.commands.state import _rows
from exactlyonce.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.pipeline.loading import load
from exactlyonce.savepoints import write_state
from tests.cli.conftest import Ended, Orders

ROWS: list[dict[str, Any]] = [{"key": f"c{number}", "state": 1000 * number} for number in range(7)]


@pytest.fixture
def imported(orders: Orders) -> Callable[..., Ended]:
    """`imported(rows, *options)` imports them for operator `totals`, from offset 200 of each partition on."""
    offsets = json.dumps({f"{orders.name}-orders": {"0": 200, "1": 200}})

    def run(rows: Any = ROWS, *options: str, operator: str = "totals") -> Ended:
        place = orders.command.folder / "rows.jsonl"
        place.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        to = ("--to", f"{orders.command.folder}/kept")
        begun = () if {"--offsets", "--base"} & {*options} else ("--offsets", offsets)
        return orders.command("state", "import", "orders:pipeline", operator, str(place), *to, *begun, *options)

    return run


def _commit(orders: Orders, group: str, offset: int) -> None:
    settings = {"bootstrap.servers": orders.kafka.bootstrap_servers, "group.id": group}
    with closing(Consumer(settings)) as consumer:
        offsets = [TopicPartition(f"{orders.name}-orders", number, offset) for number in (0, 1)]
        consumer.commit(offsets=offsets, asynchronous=False)


def _left(orders: Orders, first: int) -> dict[str, int]:
    """The orders by customer that lie at offset *first* of their partition or after it."""
    counts: dict[str, int] = {}
    settings = {"bootstrap.servers": orders.kafka.bootstrap_servers, "group.id": f"{orders.name}-counting"}
    with closing(Consumer(settings)) as consumer:
        topic = f"{orders.name}-orders"
        ends = [consumer.get_watermark_offsets(TopicPartition(topic, number))[1] for number in (0, 1)]
        consumer.assign([TopicPartition(topic, number, min(first, end)) for number, end in enumerate(ends)])
        for _ in range(sum(max(0, end - first) for end in ends)):
            message = consumer.poll(30)
            assert message is not None
            customer = json.loads(message.value() or b"")["customer"]
            counts[customer] = counts.get(customer, 0) + 1
    return counts


def test_a_run_goes_on_from_rows(orders: Orders, imported: Callable[..., Ended]) -> None:
    """The totals are those of the rows, with the orders after the group's offsets, each once, also after a kill."""
    group = f"{orders.name}-old"
    _commit(orders, group, 200)
    ended = imported(ROWS, "--offsets", f"group:{group}")
    assert ended.code == 0, ended
    url = ended.out.splitlines()[1].removeprefix("Written to ")
    assert "so that the keys were not checked" in ended.err
    assert ended.out.splitlines()[0] == f"7 rows for operator totals of {orders.name}."
    assert orders.command.done("savepoints", "verify", orders.name, url).out.startswith("Savepoint 0")
    orders.killed_at("coordinator-decided", "--from-savepoint", url, "--parallelism", "2")
    orders.ran("--from-savepoint", url)
    left = _left(orders, 200)
    assert sum(left.values()) > 0
    assert orders.states() == {row["key"]: row["state"] + left.get(row["key"], 0) for row in ROWS}
    orders.command.refused("has checkpoints, the newest is", "state", "import", "orders:pipeline", "totals", "-",
                           "--to", str(orders.command.folder), "--offsets", "earliest")  # fmt: skip


def test_a_group_that_moves_while_rows_are_read(orders: Orders) -> None:
    """A program that commits without being a member goes on: its rows count what comes after the offsets taken."""
    group, folder = f"{orders.name}-old", orders.command.folder / "kept"
    folder.mkdir()
    _commit(orders, group, 100)

    def rows() -> Iterator[tuple[str, int]]:
        yield "c1", 1
        _commit(orders, group, 200)
        yield "c2", 2

    with pytest.raises(
        ConfigError, match=r"has moved from offset 100 of .*-orders\[0\] to 200 while the rows were read"
    ):
        write_state(load("orders:pipeline").pipeline, {"totals": rows()}, to=str(folder), offsets=f"group:{group}")
    assert not [*folder.glob("*")]


def test_rows_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of JSON come as they are, from stdin, plain or compressed; rows of Parquet by column."""
    lines = [b'{"key":"c1","state":1}\n', b'{"key":"c2","state":2}\n']
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    pq.write_table(pa.table({"key": ["c1", "c2"], "state": [1, 2]}), tmp_path / "rows.parquet")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"".join(lines))))
    assert [*_rows("-", None)] == lines
    assert [*_rows(f"{tmp_path}/rows.jsonl", None)] == [*_rows(f"{tmp_path}/rows.jsonl.gz", None)] == lines
    assert [*_rows(f"{tmp_path}/rows.parquet", None)] == [{"key": "c1", "state": 1}, {"key": "c2", "state": 2}]
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"".join(lines))[:-9])
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    for name in ("rows.jsonl.gz", "rows.parquet"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read: .*Nothing was written"):
            list(_rows(f"{tmp_path}/{name}", None))
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"rows.jsonl has no rows\. Nothing was written"):
        list(_rows(f"{tmp_path}/rows.jsonl", None))


@pytest.mark.exhaustive(but=["postgres"])
@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_rows_of_a_query(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in pages, of one moment, in a transaction that writes nothing; the connection string is a reference."""
    server: Any = request.getfixturevalue(f"{kind}_server")
    monkeypatch.setenv("LEGACY_DSN", server.dsn() if callable(server.dsn) else server.dsn)
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 900)"
    query = f"{numbers} SELECT concat('c', a.i, '-', b.i) AS `key`, a.i AS `sum` FROM n a JOIN n b ON b.i <= 6;"
    query = query if kind == "mariadb" else query.replace("`", '"')
    rows = [row if isinstance(row, dict) else json.loads(row) for row in _rows("env:LEGACY_DSN", query)]
    assert sorted((row["key"], row["sum"]) for row in rows) == sorted(
        (f"c{number}-{other}", number) for number in range(1, 901) for other in range(1, 7)
    )
    for wrong in ("SELECT nothing FROM nowhere", "CREATE TABLE rows_of_a_query (i INTEGER)"):
        with pytest.raises((StoreError, StoreUnavailable)):
            list(_rows("env:LEGACY_DSN", wrong))
    with pytest.raises(ConfigError, match="write env:NAME or file:/path"):
        list(_rows("postgresql://ann:secret@db/shop", query))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("unknown operator", {"operator": "total"}, "no operator 'total' with state. Did you mean 'totals'?"),
    ("state of another type", {"rows": [ROWS[0], {"key": "c1", "state": "x"}]},
     "Row 2 for operator 'totals': state of key 'c1': Expected `int`, got `str`. Nothing was written"),
    ("key of another type", {"rows": [{"key": 7, "state": 1}]}, "Row 1 for operator 'totals': key: Expected `str`"),
    ("null key", {"rows": [{"key": None, "state": 1}]}, "Row 1 for operator 'totals': key: Expected `str`, got `null`"),
    ("no JSON", {"rows": ["{"]}, "Row 1 for operator 'totals': the row: Input data was truncated"),
    ("doubled key", {"rows": [*ROWS, {"key": "c3", "state": 1}]},
     "Rows 4 and 8 for operator 'totals': both have key 'c3'"),
]  # fmt: skip


def test_what_is_refused(orders: Orders, imported: Callable[..., Ended]) -> None:
    """Nothing is written; the message names the row and the field, or what to do."""
    orders.change(("lambda order: order.customer", "customer"), ("def make", CUSTOMER))
    assert imported().err == ""
    for kept in (orders.command.folder / "kept").iterdir():
        orders.command.done("savepoints", "delete", orders.name, str(kept))
    for name, options, text in REFUSED:
        ended = imported(**options)
        assert (ended.code in (2, 3), text in ended.said) == (True, True), (name, ended)
    topic = f"{orders.name}-orders"
    for offsets, text in [
        ("group:nobody", "with offsets='group:nobody': the group has no offset in topic"),
        ('{"other": {"0": 1}}', f"has none of topic '{topic}'"),
        (json.dumps({topic: {"0": 1}}), f"every partition of {topic} needs one; 1 has none"),
        (json.dumps({topic: {"0": 1, "1": 10_000}}), "and not 10000"),
        ("yesterday", "is 'yesterday'. Write one of: earliest, latest, start"),
    ]:
        ended = imported(ROWS, "--offsets", offsets)
        assert (ended.code, text in ended.said) == (2, True), (offsets, ended)
    line = ("state", "import", "orders:pipeline", "totals", "-", "--to", str(orders.command.folder))
    orders.command.refused("offsets is not set: say where the sources go on", *line)
    orders.command.refused("add --query", *line[:4], "env:DSN", *line[5:], "--offsets", "earliest")
    orders.command.refused("rows.nothing cannot be read: No such file", *line[:4], "rows.nothing", *line[5:],
                           "--offsets", "earliest")  # fmt: skip
    assert [*(orders.command.folder / "kept").iterdir()] == []
    with orders.running():
        ended = imported()
        assert (ended.code, "runs: process" in ended.said) == (2, True), ended


CUSTOMER = """def customer(order: Order) -> str:
    return order.customer


def make"""


def test_a_base(orders: Orders, imported: Callable[..., Ended]) -> None:
    """A savepoint in the topic gives the offsets and all state but that of the operator whose rows are given."""
    orders.ran()
    number = orders.ended_by_savepoint()
    shown = orders.command.done("state", "show", orders.name, "totals", "--json").out.splitlines()
    changed = [{**json.loads(line), "state": 7} for line in shown[1:]]
    url = json.loads(imported(changed, "--base", str(number), "--json").out)["url"]
    orders.reset()
    orders.ran("--from-savepoint", url)
    assert orders.states() == {row["key"]: 7 for row in changed}

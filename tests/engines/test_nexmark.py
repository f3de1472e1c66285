"""The queries of examples/nexmark.py: their results are those of SQL over the topics, also when all processes die."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest
from running import Job
from test_loops import EXAMPLES as FOUND

EXAMPLES = Path(__file__).parents[2] / "examples"
SOLD = """(select a.*, b.price, b.ts as bid_ts, b.bidder from auctions a join bids b on a.id = b.auction
           and b.ts between a.ts and epoch_ms(a.expires::timestamptz)
           qualify row_number() over (partition by a.id order by price desc, b.ts) = 1)"""
RANKED = (
    "(select *, unnest([0, case when price < 10000 then 1 when price < 1000000 then 2 else 3 end]) as rank from bids)"
)
DISTINCT = "count(*), count(distinct bidder), count(distinct auction)"
DAY_MS = 86_400_000
TOP = "qualify row_number() over (partition by {} order by price desc, ts) <= {}"
HOPPING = "(select *, unnest(range(ts - ts % 2000 - 8000, ts + 1, 2000)) as start from bids)"

Row = tuple[Any, ...]


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def joined(result: dict[str, Any], *fields: str) -> Row:
    return tuple((result[side] or {})[field] for side, field in (of.split(".") for of in fields))


def window(result: dict[str, Any]) -> Row:
    return ms(result["start"]), *(result["key"] if isinstance(result["key"], list) else [result["key"]])


def ranks(result: dict[str, Any], *fields: str) -> Row:
    return *window(result), *(result["value"][field] for field in fields)


QUERIES: dict[str, tuple[str, Callable[[dict[str, Any]], Row]]] = {
    "q0": (
        "select auction, bidder, price, ts, extra from bids",
        lambda bid: (bid["auction"], bid["bidder"], bid["price"], ms(bid["at"]), bid["extra"]),
    ),
    "q1": (
        "select auction, (908 * price)::bigint, ts from bids",
        lambda bid: (bid["auction"], round(float(bid["price"]) * 1000), ms(bid["at"])),
    ),
    "q2": ("select auction, price from bids where auction % 123 = 0", lambda bid: (bid["auction"], bid["price"])),
    "q3": (
        """select p.name, p.city, p.state, a.id from auctions a join persons p on a.seller = p.id
           where a.category = 10 and p.state in ('OR', 'ID', 'CA')""",
        lambda result: joined(result, "left.name", "left.city", "left.state", "right.id"),
    ),
    "q4": (
        f"select category, avg(price) from {SOLD} group by category",
        lambda average: (average["of"], average["price"]),
    ),
    "q5": (
        f"""select start, auction, count(*) as n from {HOPPING} group by start, auction
            qualify n = max(n) over (partition by start)""",
        lambda result: (),
    ),
    "q6": (
        f"""select seller, avg(price) over (partition by seller order by expires
                                        rows between 9 preceding and current row) from {SOLD}""",
        lambda average: (average["of"], average["price"]),
    ),
    "q7": (
        f"select ts - ts % 10000, auction, bidder, price from bids {TOP.format('ts - ts % 10000', 1)}",
        lambda result: (ms(result["start"]), *best(only(only(result["value"])["value"]))),
    ),
    "q8": (
        """select distinct p.ts - p.ts % 10000, p.id, p.name from persons p join auctions a
           on a.seller = p.id and a.ts - a.ts % 10000 = p.ts - p.ts % 10000""",
        lambda result: (*window(result["left"]), result["left"]["value"]),
    ),
    "q9": (
        f"select id, seller, bidder, price, bid_ts from {SOLD}",
        lambda sold: (sold["auction"]["id"], sold["auction"]["seller"], *best(sold["bid"])[1:], ms(sold["bid"]["at"])),
    ),
    "q10": (
        """select auction, price, strftime(make_timestamp(ts * 1000), '%Y-%m-%d'),
           strftime(make_timestamp(ts * 1000), '%H:%M') from bids""",
        lambda bid: (bid["auction"], bid["price"], bid["day"], bid["minute"]),
    ),
    "q11": (
        """select min(ts), bidder, count(*) from (
             select *, sum(opens::int) over (partition by bidder order by ts) as number from (
               select *, coalesce(ts - lag(ts) over (partition by bidder order by ts), 10000) >= 10000 as opens
               from bids)) group by bidder, number""",
        lambda result: (*window(result), result["value"]),
    ),
    "q12": ("select bidder, count(*) from bids group by bidder", lambda counted: ()),
    "q13": (
        "select auction, bidder, price, ts, 'value-' || auction % 1000 from bids",
        lambda result: (
            *joined(result, "left.auction", "left.bidder", "left.price"), ms(result["left"]["at"]), result["right"]
        ),
    ),
    "q14": (
        """select auction, (908 * price)::bigint,
           case when hour between 8 and 18 then 'day' when hour <= 6 or hour >= 20 then 'night' else 'other' end,
           length(extra) - length(replace(extra, 'c', ''))
           from (select *, hour(make_timestamp(ts * 1000)) as hour from bids)
           where 0.908 * price > 1000000 and 0.908 * price < 50000000""",
        lambda bid: (bid["auction"], round(float(bid["price"]) * 1000), bid["kind"], bid["count"]),
    ),
    "q15": (
        f"select ts - ts % {DAY_MS}, rank, {DISTINCT} from {RANKED} group by all",
        lambda result: ranks(result, "bids", "bidders", "auctions"),
    ),
    "q16": (
        f"""select ts - ts % {DAY_MS}, channel, rank, max(strftime(make_timestamp(ts * 1000), '%H:%M')), {DISTINCT}
            from {RANKED} group by all""",
        lambda result: ranks(result, "minute", "bids", "bidders", "auctions"),
    ),
    "q17": (
        f"""select ts - ts % {DAY_MS}, auction, count(*), count(*) filter (price < 10000),
            count(*) filter (price between 10000 and 999999), count(*) filter (price >= 1000000),
            min(price), max(price), sum(price)::bigint, avg(price) from bids group by all""",
        lambda result: ranks(result, "bids", "rank1", "rank2", "rank3", "least", "most", "sum", "mean"),
    ),
    "q18": (
        """select bidder, auction, price, ts from bids
           qualify row_number() over (partition by bidder, auction order by ts desc) = 1""",
        lambda bid: (bid["bidder"], bid["auction"], bid["price"], ms(bid["at"])),
    ),
    "q19": (
        f"select ts - ts % {DAY_MS}, auction, price from bids {TOP.format(f'auction, ts - ts % {DAY_MS}', 10)}",
        lambda result: (),
    ),
    "q20": (
        """select b.auction, b.bidder, b.price, a.item, a.seller from bids b
           join auctions a on b.auction = a.id and a.category = 10""",
        lambda result: joined(result, "left.auction", "left.bidder", "left.price", "right.item", "right.seller"),
    ),
    "q21": (
        """select auction, bidder, price, channel, id from (
             select *, coalesce(map {'apple': '0', 'google': '1', 'facebook': '2', 'baidu': '3'}[lower(channel)],
                                nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '')) as id from bids)
           where id is not null""",
        lambda bid: (bid["auction"], bid["bidder"], bid["price"], bid["channel"], bid["id"]),
    ),
    "q22": (
        "select auction, price, split_part(url, '/', 4), split_part(url, '/', 5), split_part(url, '/', 6) from bids",
        lambda bid: (bid["auction"], bid["price"], *bid["folders"]),
    ),
}  # fmt: skip
"""By query: the SQL, and the row of a result."""


def best(bid: dict[str, Any]) -> Row:
    return bid["auction"], bid["bidder"], bid["price"]


def only(values: list[Any]) -> Any:
    """The one of *values*."""
    (value,) = values
    return value


def rows(query: str, results: list[dict[str, Any]]) -> list[Row]:
    of = QUERIES[query][1]
    if query == "q5":
        return [
            (ms(result["end"]) - 10_000, bids["auction"], bids["count"])
            for result in results
            for bids in result["value"]
        ]
    if query == "q19":
        return [(*window(result), bid["price"]) for result in results for bid in result["value"]]
    if query in ("q4", "q18"):  # the last by key counts
        return [*{row[: 1 + (query == "q18")]: row for row in map(of, results)}.values()]
    return [*map(of, results)]


def assert_each_once(results: Callable[[str], list[dict[str, Any]]]) -> None:
    """q4 has an average after each auction that was sold, and q18 each bid: of both, the queries have the last ones."""
    averages = Counter(average["of"] for average in results("q4"))
    assert averages == Counter(sold["auction"]["category"] for sold in results("q9"))
    of = QUERIES["q18"][1]
    assert Counter(map(of, results("q18"))) == Counter(map(of, results("bids")))


class House:
    """The auction house of a job."""

    def __init__(self, job: Job) -> None:
        self.job, self.fed = job, 0
        for of, partitions in (("persons", 1), ("auctions", 2), ("bids", 3), ("side", 2)):
            job.kafka.create_topic(f"{job.name}-{of}", partitions)

    def feed_side(self) -> None:
        from nexmark_events import side_input

        records = [(str(key), value) for key, value in side_input()]
        self.job.kafka.produce(f"{self.job.name}-side", records)

    def feed(self, count: int) -> None:
        from nexmark_events import Auction, Bid, Person, events

        more = [*events(self.fed, self.fed + count)]
        for of, type_ in (("persons", Person), ("auctions", Auction), ("bids", Bid)):
            records = [(str(event.at), msgspec.json.encode(event)) for event in more if isinstance(event, type_)]
            self.job.kafka.produce(f"{self.job.name}-{of}", records)
        self.fed += count

    def by_sql(self, folder: Path) -> dict[str, list[Row]]:
        with duckdb.connect() as database:
            for of in ("persons", "auctions", "bids"):
                file = folder / f"{of}.json"
                file.write_text("\n".join(json.dumps(event) for event in self.values(of)))
                database.execute(
                    f"""create table {of} as select *, epoch_ms("at"::timestamptz) as ts
                        from read_json('{file}', format = 'newline_delimited')"""
                )
            ties = f"select 1 from {SOLD} group by seller, expires having count(*) > 1"
            assert database.sql(ties).fetchall() == []
            return {query: sorted(database.sql(sql).fetchall()) for query, (sql, _) in QUERIES.items()}

    def values(self, topic: str) -> list[dict[str, Any]]:
        return [json.loads(record.value or b"") for record in self.job.kafka.read_committed(f"{self.job.name}-{topic}")]

    def assert_as_by_sql(self, folder: Path, open_counts: dict[int, int]) -> None:
        assert_each_once(self.values)
        for query, expected in self.by_sql(folder).items():
            results = self.values(query)
            if query == "q12":  # only the sums do not depend on the run
                counts = Counter(open_counts)
                for counted in results:
                    counts[counted["auction"]] += counted["count"]
                assert sorted(counts.items()) == expected
            else:
                assert len(expected) > 3, query
                assert sorted(rows(query, results)) == expected, query


@pytest.fixture
def house(job_of: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return House(job_of("nexmark:pipeline"))


BID = {"auction": 1, "bidder": 2, "price": 3, "at": "2026-01-01T00:00:00Z"}
SOLD_ONE = {"auction": {"category": 10}}


@pytest.mark.parametrize("doubled", ["q4", "q18"])
def test_a_result_given_twice_is_found(doubled: str) -> None:
    """Also where the last one of a key is compared."""
    given: dict[str, list[dict[str, Any]]] = {
        "q4": [{"of": 10, "price": 3.0}], "q9": [SOLD_ONE], "q18": [BID], "bids": [BID],
    }  # fmt: skip
    assert_each_once(given.__getitem__)
    given[doubled] = 2 * given[doubled]
    with pytest.raises(AssertionError):
        assert_each_once(given.__getitem__)


def test_a_second_highest_bid_of_a_window_is_found() -> None:
    highest = {"start": "2026-01-01T00:00:00Z", "value": [{"value": [BID]}]}
    assert rows("q7", [highest])
    for more in ([{"value": [BID, BID]}], [{"value": [BID]}, {"value": [BID]}]):
        with pytest.raises(ValueError, match="too many values"):
            rows("q7", [{**highest, "value": more}])


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.exhaustive
def test_results_are_those_of_sql_though_all_processes_die(house: House, failpoint: Any, tmp_path: Path) -> None:
    house.feed_side()
    house.job.finish_here()
    for parallelism, name, nth in ((2, "timed-fired", 9), (1, "coordinator-committed", 1)):
        house.feed(1_200)
        house.job.run_killed({**FOUND, **failpoint(name, nth=nth)}, parallelism)
    house.feed(1_200)
    house.job.finish("--parallelism", "2", "--drain", env=FOUND)
    shown = house.job.command("state", "show", house.job.name, "q12", "--json")
    states = [json.loads(line) for line in shown.splitlines()]
    house.assert_as_by_sql(
        tmp_path, {state["key"]: count for state in states if isinstance(count := state["state"], int)}
    )

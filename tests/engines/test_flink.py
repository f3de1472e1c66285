"""Flink as an oracle: its SQL for the queries of Nexmark gives the rows that our pipelines give of the same events."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from running import Job
from test_loops import EXAMPLES as FOUND
from test_nexmark import EXAMPLES, House, assert_each_once, rows

from exactlyonce.connectors.embedded.programs import find_java
from exactlyonce.testing.servers.programs import copy_jars, downloaded

PROGRAM = Path(__file__).with_name("FlinkOracle.java")
VERSION = "2.2.0"
NAMES = (
    *("flink-table-api-java-bridge", "flink-table-planner-loader", "flink-table-runtime", "flink-clients"),
    *("flink-connector-base", "flink-connector-files", "flink-json"),
)
ARTIFACTS = [*(f"org.apache.flink:{name}:{VERSION}" for name in NAMES), "org.slf4j:slf4j-nop:1.7.36"]
EVENTS, RUN_EVENTS = int(os.environ.get("NEXMARK_EVENTS", "20000")), 100_000
"""How many in all, and how many a run reads at most: it takes a few minutes for them."""
OPENED = [
    argument
    for package in ("lang", "util", "lang.invoke", "nio", "time", "net", "math", "util.concurrent.atomic")
    for argument in ("--add-opens", f"java.base/java.{package}=ALL-UNNAMED")
]
"""What Flink wants of Java 17."""

TABLES = {
    "persons": "id bigint, name string, email string, city string, state string",
    "auctions": "id bigint, item string, expires timestamp_ltz(3), seller bigint, category bigint",
    "bids": "auction bigint, bidder bigint, price bigint, channel string, url string, extra string",
}
"""The columns of each, beside its time."""
TIMED = ", `at` timestamp_ltz(3), watermark for `at` as `at` - interval '4' second"
FILES = "with ('connector' = 'filesystem', 'path' = 'file://{}', 'format' = 'json', " \
    "'json.timestamp-format.standard' = 'ISO-8601')"  # fmt: skip
RANKED = (
    "create view ranked as select *, 0 as ranks from bids union all select *, case when price < 10000 then 1 "
    "when price < 1000000 then 2 else 3 end as ranks from bids"
)
WINDOW = "window_start, window_end"
DISTINCT = "count(*), count(distinct bidder), count(distinct auction)"
BY_DAY = "table(tumble(table {}, descriptor(`at`), interval '1' day))"
TEN = "table(tumble(table {}, descriptor(`at`), interval '10' second))"
HOPS = (
    f"select {WINDOW}, auction, count(*) as n from "
    "table(hop(table bids, descriptor(`at`), interval '2' second, interval '10' second)) "
    f"group by {WINDOW}, auction"
)
BIDS_IN_TIME = "auctions a join bids b on a.id = b.auction and b.`at` between a.`at` and a.expires"

QUERIES = {
    "q0": "select auction, bidder, price, `at`, extra from bids",
    "q1": "select auction, 1000 * (0.908 * price), `at` from bids",
    "q2": "select auction, price from bids where mod(auction, 123) = 0",
    "q3": """select p.name, p.city, p.state, a.id from auctions a join persons p on a.seller = p.id
             where a.category = 10 and p.state in ('OR', 'ID', 'CA')""",
    "q4": f"""select category, avg(cast(price as double)) from (
                select a.id, a.category, max(b.price) as price from {BIDS_IN_TIME} group by a.id, a.category)
              group by category""",
    "q5": f"""select c.window_start, c.auction, c.n from ({HOPS}) c join (
                select {WINDOW}, max(n) as most from ({HOPS}) group by {WINDOW}) m
              on c.window_start = m.window_start and c.window_end = m.window_end and c.n = m.most""",
    "q7": f"""select window_start, auction, bidder, price from (
                select *, row_number() over (partition by {WINDOW} order by price desc, `at`) as place
                from {TEN.format("bids")}) where place = 1""",
    "q8": f"""select p.window_start, p.id, p.name from (
                select {WINDOW}, id, name from {TEN.format("persons")} group by {WINDOW}, id, name) p
              join (select {WINDOW}, seller from {TEN.format("auctions")} group by {WINDOW}, seller) a
              on p.id = a.seller and p.window_start = a.window_start and p.window_end = a.window_end""",
    "q9": f"""select id, seller, bidder, price, bid_at from (
                select a.id, a.seller, b.bidder, b.price, b.`at` as bid_at,
                  row_number() over (partition by a.id order by b.price desc, b.`at`) as place from {BIDS_IN_TIME})
              where place = 1""",
    "q10": "select auction, price, date_format(`at`, 'yyyy-MM-dd'), date_format(`at`, 'HH:mm') from bids",
    "q11": f"""select window_start, bidder, count(*) from
                 table(session(table bids partition by bidder, descriptor(`at`), interval '9.999' second))
               group by {WINDOW}, bidder""",
    "q13": """select b.auction, b.bidder, b.price, b.`at`, s.found
              from bids b join side s on mod(b.auction, 1000) = s.id""",
    "q14": """select auction, 1000 * (0.908 * price), case when hour(`at`) between 8 and 18 then 'day'
                when hour(`at`) <= 6 or hour(`at`) >= 20 then 'night' else 'other' end,
                char_length(extra) - char_length(replace(extra, 'c', ''))
              from bids where 0.908 * price > 1000000 and 0.908 * price < 50000000""",
    "q15": f"select window_start, ranks, {DISTINCT} from {BY_DAY.format('ranked')} group by {WINDOW}, ranks",
    "q16": f"""select window_start, channel, ranks, max(date_format(`at`, 'HH:mm')), {DISTINCT}
               from {BY_DAY.format("ranked")} group by {WINDOW}, channel, ranks""",
    "q17": f"""select window_start, auction, count(*), count(*) filter (where price < 10000),
                 count(*) filter (where price >= 10000 and price < 1000000), count(*) filter (where price >= 1000000),
                 min(price), max(price), sum(price), avg(cast(price as double))
               from {BY_DAY.format("bids")} group by {WINDOW}, auction""",
    "q18": """select bidder, auction, price, `at` from (
                select *, row_number() over (partition by bidder, auction order by `at` desc) as place from bids)
              where place = 1""",
    "q19": f"""select window_start, auction, price from (
                 select *, row_number() over (partition by {WINDOW}, auction order by price desc, `at`) as place
                 from {BY_DAY.format("bids")}) where place <= 10""",
    "q20": """select b.auction, b.bidder, b.price, a.item, a.seller from bids b
              join auctions a on b.auction = a.id and a.category = 10""",
    "q21": """select * from (select auction, bidder, price, channel, case lower(channel) when 'apple' then '0'
                when 'google' then '1' when 'facebook' then '2' when 'baidu' then '3'
                else regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) end as id from bids) where id is not null""",
    "q22": """select auction, price, split_index(url, '/', 3), split_index(url, '/', 4), split_index(url, '/', 5)
              from bids""",
}  # fmt: skip
"""q6 is refused by Flink's planner, and q12 goes by the clock."""


def by_flink(house: House, folder: Path) -> dict[str, list[list[str]]]:
    """The rows of each query."""
    (folder / "queries").mkdir()
    statements = [RANKED]
    for of, columns in TABLES.items():
        file = folder / f"{of}.json"
        file.write_text("\n".join(json.dumps(event) for event in sorted(house.values(of), key=itemgetter("at"))))
        statements.insert(0, f"create table {of} ({columns}{TIMED}) {FILES.format(file)}")
    side = house.job.kafka.read_committed(f"{house.job.name}-side")
    values = [{"id": int(record.key or b""), "found": (record.value or b"").decode()} for record in side]
    (folder / "side.json").write_text("\n".join(map(json.dumps, values)))
    statements.insert(0, f"create table side (id bigint, found string) {FILES.format(folder / 'side.json')}")
    (folder / "tables.sql").write_text("\n".join(statements))
    for name, sql in QUERIES.items():
        (folder / "queries" / f"{name}.sql").write_text(sql)
    jars = downloaded(f"flink-sql-{VERSION}", lambda part: copy_jars(ARTIFACTS, part, folder, "FLINK MISSING"))
    command = [find_java(), "-Xmx2g", *OPENED, "-cp", f"{jars}/*", PROGRAM, folder / "tables.sql", folder / "queries"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4_000:]
    answers = {name: (folder / "queries" / f"{name}.rows").read_text().splitlines() for name in QUERIES}
    found: dict[str, list[list[str]]] = {name: list(map(json.loads, lines)) for name, lines in answers.items()}
    return {**found, "q9": [*{row[0]: row for row in found["q9"]}.values()]}


def _texts(found: Iterable[Any]) -> Counter[tuple[str, ...]]:
    """Rows with their fields as text; numbers with a fraction have four digits of it."""
    return Counter(tuple(map(_text, row)) for row in found)


def _text(field: Any) -> str:
    text = str(field)
    if isinstance(field, float | Decimal) or (
        text.replace(".", "", 1).replace("E", "").isdigit() and not text.isdigit()
    ):
        return f"{float(text):.4f}".rstrip("0").rstrip(".")
    return text


@pytest.fixture
def house(job_of: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return House(job_of("nexmark:pipeline"))


@pytest.mark.broker
@pytest.mark.exhaustive(matrix=True)
def test_queries_of_nexmark(house: House, tmp_path: Path) -> None:
    house.feed_side()
    house.job.finish_here()
    while house.fed < EVENTS:
        house.feed(min(RUN_EVENTS, EVENTS - house.fed))
        drain = ["--drain"] if house.fed == EVENTS else []
        # Each checkpoint has 42 transactions: those of tests, every 200 ms, would take all of the time.
        house.job.finish("--parallelism", "2", *drain, "--checkpoint-interval", "10s", env=FOUND)
    assert_each_once(house.values)
    theirs, differ = by_flink(house, tmp_path), []
    for query in QUERIES:
        ours = _texts(rows(query, house.values(query)))
        if ours != (expected := _texts(theirs[query])):
            some = [*(ours - expected)][:3], [*(expected - ours)][:3]
            differ.append(f"{query}: {ours.total()} rows, and Flink has {expected.total()}; such as {some}")
    assert not differ, "\n".join(differ)

"""Flights of a day into a table of PostgreSQL and files of Parquet, in one checkpoint, with a kill between the two.

    export FLIGHTS_DSN=postgresql://me@127.0.0.1/flights
    python examples/flights_to_stores.py --bootstrap-servers 127.0.0.1:9092

The table has the totals of each carrier, the files have every flight. The first run is killed when one of the stores
has its rows and the other may not. The second run goes on, and both agree: to the last flight, and without one twice.
"""

# pyarrow has no types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import msgspec
import psycopg
import pyarrow.dataset  # pyright: ignore[reportMissingTypeStubs]
from confluent_kafka import Producer
from demo_count import delay, rows

from exactlyonce import KafkaSource, Pipeline
from exactlyonce.cli.demo.feeding import create_topics
from exactlyonce.sinks import FileSink, PostgresSink

LIMIT_S = 60
TOTALS = "SELECT carrier, flights, cancelled FROM flight_totals ORDER BY flights DESC"
FIRST_DAY = ("2013", "1", "1")


class Flight(msgspec.Struct):
    id: int
    carrier: str
    delay: int | None
    """Minutes; None: cancelled."""


class CarrierTotals(msgspec.Struct):
    carrier: str
    flights: int = 0
    cancelled: int = 0


def count(totals: CarrierTotals | None, flight: Flight) -> tuple[CarrierTotals, CarrierTotals]:
    before = totals or CarrierTotals(flight.carrier)
    after = CarrierTotals(flight.carrier, before.flights + 1, before.cancelled + (flight.delay is None))
    return after, after


def make(topic: str, folder: str) -> Pipeline:
    """The flights of TOPIC into FOLDER, and the totals of each carrier into a table."""
    pipeline = Pipeline(f"{topic}-to-stores")
    read = pipeline.source("flights", KafkaSource(topic, value=Flight))
    read.sink("files", FileSink(folder, format="parquet"))
    table = PostgresSink[CarrierTotals](
        "flight_totals", dsn="env:FLIGHTS_DSN", mode="upsert", key=("carrier",), create=True
    )
    read.key_by(lambda flight: flight.carrier).stateful_map("totals", count).sink("table", table)
    return pipeline


def feed(servers: str, topic: str) -> int:
    """Create *topic* with the flights of a day; returns their number."""
    create_topics(servers, [topic], 2)
    flown = [row for row in rows() if (row["year"], row["month"], row["day"]) == FIRST_DAY]
    producer = Producer({"bootstrap.servers": servers})
    for id, row in enumerate(flown):
        producer.produce(topic, msgspec.json.encode(Flight(id, row["carrier"], delay(row))), row["carrier"])
    producer.flush(LIMIT_S)
    return len(flown)


def run(servers: str, topic: str, folder: str, killed_at: str = "") -> int:
    """Run the pipeline to the end of the topic in processes of its own; returns the exit code."""
    command = [sys.executable, "-m", "exactlyonce.cli.main", "run", "flights_to_stores:make", "--until", "latest"]
    options = ["--param", f"topic={topic}", "--param", f"folder={folder}", "--bootstrap-servers", servers]
    with tempfile.TemporaryDirectory() as fired:
        kills = {"EXACTLYONCE_FAILPOINTS": f"{killed_at}=kill", "EXACTLYONCE_FAILPOINTS_FIRED": fired}
        environment = {**os.environ, **(kills if killed_at else {})}
        here = Path(__file__).parent
        return subprocess.run([*command, *options], env=environment, cwd=here, stderr=subprocess.DEVNULL).returncode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-servers", required=True)
    servers = parser.parse_args().bootstrap_servers
    topic = f"flights-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        print(f"{feed(servers, topic)} flights on 1 January 2013")
        print(f"the first run ends with {run(servers, topic, folder, killed_at='store-committed')}")
        print(f"the second run ends with {run(servers, topic, folder)}")
        files = pyarrow.dataset.dataset(folder, format="parquet").to_table().to_pylist()
    with psycopg.connect(os.environ["FLIGHTS_DSN"]) as connection:
        table = connection.execute(TOTALS).fetchall()
    for carrier, total, cancelled in table[:3]:
        rows = [flight for flight in files if flight["carrier"] == carrier]
        gone = sum(flight["delay"] is None for flight in rows)
        print(f"  {carrier}  {total} flights, {cancelled} cancelled; in the files {len(rows)} and {gone}")
    different = len({flight["id"] for flight in files})
    print(f"{sum(row[1] for row in table)} in PostgreSQL, {len(files)} in the files, {different} different ones")


if __name__ == "__main__":
    main()

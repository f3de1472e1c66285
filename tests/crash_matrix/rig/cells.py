"""The cells of the matrix: each is one way in which a row's fault meets one pipeline; and the trial of one."""

from __future__ import annotations

import json
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from crossing import DSN, SLOW, table
from kafka_proxy import Fate, Fault, KafkaProxy
from oracles import (
    Reader,
    Row,
    Seen,
    TableReader,
    TopicReader,
    assert_ledger,
    await_no_open_transaction,
    values,
)
from rows import ALIGNED, ROWS, UNALIGNED, Crash, Request
from running import Run, assert_once, assert_updates, await_stopped, orders
from unreferenced import newest_checkpoint, unreferenced_blocks
from waiting import until

from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster
from exactlyonce.testing.servers.postgres import PostgresServer

HERE = Path(__file__).parent
PARALLELISMS = (1, 2)
IN_PARTITIONS, OUT_PARTITIONS = 3, 4
FENCED = 5
SETTINGS = (
    "--checkpoint-interval", "1s", "--checkpoint-timeout", "5s", "--deploy-timeout", "30s", "--restart",
    "fixed_delay:attempts=20,delay=100ms",
)  # fmt: skip
FEED = 300
"""Records that are fed at once."""
HELD_S = 1.0
"""How long an answer is held that comes late."""


@dataclass(frozen=True)
class Cell:
    row: int
    fault: str
    action: str
    shape: str
    sinks: str
    parallelism: int
    mode: str

    @property
    def name(self) -> str:
        return "/".join(map(str, asdict(self).values()))

    @property
    def way(self) -> Crash | Request:
        (row,) = [each for each in ROWS if each.number == self.row]
        (way,) = [each for each in row.ways if each.name == self.fault]
        return way


def cells() -> Iterator[Cell]:
    """All that apply: one worker has no channels between workers, so that no barrier has anything to overtake."""
    for row in ROWS:
        for way in row.ways:
            for action in way.actions:
                for shape in way.shapes:
                    for sinks in way.sinks:
                        for parallelism in PARALLELISMS:
                            for mode in way.modes if parallelism > 1 else {ALIGNED}.intersection(way.modes):
                                yield Cell(row.number, way.name, action, shape, sinks, parallelism, mode)


class Servers:
    def __init__(self, kafka: KafkaCluster, proxy: KafkaProxy, postgres: PostgresServer, folder: Path) -> None:
        """*kafka* is reached through *proxy*."""
        self.kafka, self.proxy, self.postgres, self.folder = kafka, proxy, postgres, folder


class Trial:
    def __init__(self, cell: Cell, servers: Servers) -> None:
        self.cell, self.servers = cell, servers
        self.name = f"row{cell.row}-{uuid.uuid4().hex[:8]}"
        self.fed: list[tuple[str, str]] = []
        self.runs: list[Run] = []
        self._faults: list[Fault] = []
        self._folder = servers.folder / self.name
        self._folder.mkdir()
        self._readers: dict[str, Reader] = {}
        self._inputs = ("in", "more") if cell.shape == "diamond" else ("in",)
        self._contents = ("totals", "copies") if cell.shape == "diamond" else ("totals",)
        self._to_kafka = self._contents if cell.sinks in ("kafka", "both") else ()
        self._to_postgres = self._contents if cell.sinks in ("postgres", "both") else ()
        for each in self._inputs:
            servers.kafka.create_topic(f"{self.name}-{each}", IN_PARTITIONS)
        for each in self._to_kafka:
            topic = servers.kafka.create_topic(f"{self.name}-{each}", OUT_PARTITIONS)
            reader = TopicReader(servers.kafka.bootstrap_servers, topic, OUT_PARTITIONS)
            self._read(topic, reader, reader.close)
        for each in self._to_postgres:
            self._make_table(each)
            rows = TableReader(servers.postgres, table(self.name, each))
            self._read(table(self.name, each), rows, rows.close)

    def _read(self, where: str, look: Callable[[], Iterable[Seen]], close: Callable[[], None]) -> None:
        self._readers[where] = Reader(where, look, close)
        self._readers[where].start()

    def _make_table(self, content: str) -> None:
        columns = "id bigint NOT NULL, customer text NOT NULL, " + ("sum" if content == "totals" else "total")
        self.servers.postgres.execute(
            f"CREATE TABLE {table(self.name, content)} (place bigserial PRIMARY KEY, {columns} bigint NOT NULL)"
        )

    def _in_postgres(self, content: str) -> list[Seen]:
        with closing(TableReader(self.servers.postgres, table(self.name, content))) as rows:
            return rows()

    def _in_kafka(self, content: str) -> list[Seen]:
        found = self.servers.kafka.read_committed(f"{self.name}-{content}")
        return [Seen((each.partition, each.offset), values(each.value)) for each in found]

    # --- what happens -------------------------------------------------------------------------------------------

    def feed(self, number: int = FEED) -> None:
        more = orders(number, first=len(self.fed))
        for place, each in enumerate(self._inputs):
            self.servers.kafka.produce(f"{self.name}-{each}", more[place :: len(self._inputs)])
        self.fed += more

    def run(self, *arguments: str, parallelism: int | None = None, armed: Mapping[str, str] | None = None) -> Run:
        cell = self.cell
        parameters = {"name": self.name, "shape": cell.shape, "sinks": cell.sinks}
        dsn = self.servers.postgres.dsn("postgres")
        begun = Run(
            self.servers.kafka.bootstrap_servers,
            "crossing:crossing",
            *[part for item in parameters.items() for part in ("--param", "=".join(item))],
            *SETTINGS,
            *("--parallelism", str(parallelism or cell.parallelism)),
            *(("--unaligned",) if cell.mode == UNALIGNED else ()),
            *arguments,
            env={"PYTHONPATH": str(HERE), DSN: dsn, **(armed or {})},
        )
        self.runs.append(begun)
        return begun

    def finish(self, *, parallelism: int | None = None) -> None:
        last = self.run("--until", "latest", parallelism=parallelism)
        assert last.wait() == 0, last.said

    def await_output(self, run: Run) -> None:
        since_ms = time.time() * 1000
        self.feed()
        run.await_event(
            lambda event: (
                event["event"] == "checkpoint" and event["records_committed"] > 0 and event["at_ms"] > since_ms
            )
        )

    def end(self, run: Run) -> None:
        run.process.terminate()
        assert run.wait() == 0, run.said

    def forget(self) -> None:
        """Make room on the servers, which thousands of cells share."""
        names = [*self._inputs, *self._to_kafka]
        topics = [*(f"{self.name}-{each}" for each in names), checkpoint_topic(self.name)]
        admin = self.servers.kafka.admin()
        for deleted in admin.delete_topics(topics).values():
            deleted.result(LIMIT_S)
        for each in self._to_postgres:
            self.servers.postgres.execute(f"DROP TABLE {table(self.name, each)}")

    def close(self) -> None:
        for reader in self._readers.values():
            reader.end()
        for fault in self._faults:
            self.servers.proxy.disarm(fault)
        for run in self.runs:
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGCONT)
                run.kill()

    # --- a process meets a failpoint ----------------------------------------------------------------------------

    def crash(self, way: Crash) -> None:
        fired = self._folder / way.point
        armed = {
            "EXACTLYONCE_FAILPOINTS": f"{way.point}={self.cell.action}@{way.nth}",
            "EXACTLYONCE_FAILPOINTS_FIRED": str(self._folder),
            **({SLOW: "0.005"} if way.slow else {}),
        }
        self.feed()
        run = self.run(armed=armed)

        def go_on() -> None:
            assert run.process.poll() in (None, -signal.SIGKILL), run.said
            self.feed(100)

        until(fired.exists, meanwhile=go_on, told=lambda: run.said, pause_s=0.2)
        if not way.in_coordinator:
            self.await_output(run)
            self.end(run)
        elif self.cell.action == "stop":
            self._take_over(run)
        elif self.cell.action == "kill":
            assert run.wait() == -signal.SIGKILL
        else:
            assert run.wait() not in (0, FENCED), "a defect of its own ends a coordinator"

    def _take_over(self, sleeper: Run) -> None:
        await_stopped(sleeper.process.pid)
        self.feed()
        self.finish()
        sleeper.process.send_signal(signal.SIGCONT)
        assert sleeper.wait() == FENCED, sleeper.said

    # --- a request has another fate -----------------------------------------------------------------------------

    def lose(self, way: Request) -> None:
        run = self.run()
        self.await_output(run)
        holding, lacking = (
            each.replace("NAME", self.name).encode() if each else None for each in (way.holding, way.lacking)
        )
        assert holding is not None
        fault = self.servers.proxy.arm(Fault(way.api, Fate(self.cell.action), holding, lacking))
        self._faults.append(fault)

        def go_on() -> None:
            assert run.process.poll() is None, run.said
            self.feed(100)

        until(fault.met.is_set, meanwhile=go_on, told=lambda: run.said, pause_s=0.1)
        if fault.fate is Fate.ANSWER_LATE:  # nothing is decided meanwhile: the job has to wait, and goes on then
            time.sleep(HELD_S)
        else:
            self.await_output(run)
        if fault.fate in (Fate.LATE, Fate.ANSWER_LATE):
            fault.released.set()
            assert fault.arrived.wait(LIMIT_S)
            self.await_output(run)
        self.end(run)

    # --- what is so then ----------------------------------------------------------------------------------------

    def assert_exact(self) -> int:
        topics = {f"{self.name}-{each}": OUT_PARTITIONS for each in self._to_kafka}
        await_no_open_transaction(self.servers.kafka, self.name, topics)  # before that readers may see less
        totals, verified = list[dict[int, Row]](), 0
        found = {f"{self.name}-{each}": (each, self._in_kafka(each)) for each in self._to_kafka}
        found |= {table(self.name, each): (each, self._in_postgres(each)) for each in self._to_postgres}
        for where, (content, seen) in found.items():
            rows = [row for _, row in seen]
            if content == "totals":
                updates = [dict(zip(("id", "customer", "sum"), row, strict=True)) for row in rows]
                assert_updates(updates, self.fed, where)
                totals.append({row[0]: row for row in rows})
            else:
                assert_once([row[0] for row in rows], self.fed, where)
            self._readers[where].assert_kept(dict(seen))
            verified += len(rows)
        assert all(each == totals[0] for each in totals), "all stores have the same totals"
        left = unreferenced_blocks(self.servers.kafka, self.name)
        assert left == set(), f"blocks that nobody refers to: {left}"
        if self._to_postgres:
            decided = newest_checkpoint(self.servers.kafka, self.name).ledger
            assert_ledger(self.servers.postgres, self.name, decided)
        return verified


def try_cell(cell: Cell, servers: Servers) -> int:
    trial = Trial(cell, servers)
    try:
        if isinstance(cell.way, Crash):
            trial.crash(cell.way)
        else:
            trial.lose(cell.way)
        trial.feed()
        trial.finish(parallelism=3 - cell.parallelism)
        verified = trial.assert_exact()
        trial.forget()
        return verified
    finally:
        trial.close()
        (trial.servers.folder / f"{trial.name}.json").write_text(
            json.dumps([{"said": run.said, "events": run.events} for run in trial.runs])
        )

"""The cells of the matrix: each is one way in which a row's fault meets one pipeline; and the trial of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from crossing import DSN, LAKE, LAKES, SLOW, STREAM, TIMED, iceberg_catalog, table
from drivers import Driver
from folds import Event, crowd, ending, event_of, events, expected
from kafka_proxy import Fate, Fault, KafkaProxy
from oracles import (
    LakeReader,
    Reader,
    Row,
    Seen,
    TableReader,
    TopicReader,
    assert_ledger,
    assert_order,
    assert_rows,
    await_no_open_transaction,
    values,
)
from rows import (
    ALIGNED,
    ON_SPARK,
    ROWS,
    UNALIGNED,
    AtFailpoint,
    Bounded,
    Crash,
    FromSavepoint,
    Request,
    Streamed,
    TakenOver,
)
from running import Fed, Run, assert_updates, await_stopped, orders
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
KEYS = 13
"""Keys of events, which say where an event is, and nothing else."""
SOME = 20
IN_ORDER = ("chain", "diamond")
"""The shapes in which no order overtakes another of its partition and customer."""
FILES = 3
"""Files of a stream: each is a batch of its own, with as many records as are fed at once."""
CHUNK, CHUNKS = 500, 3
"""Records of a chunk of a backfill, and how many chunks are fed."""
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
    def way(self) -> AtFailpoint | Request:
        (row,) = [each for each in ROWS if each.number == self.row]
        (way,) = [each for each in row.ways if each.name == self.fault and self.mode in each.modes]
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
        self.fed: Fed = []
        self.runs: list[Run] = []
        self._faults: list[Fault] = []
        self._folder = servers.folder / self.name
        self._folder.mkdir()
        self._readers: dict[str, Reader] = {}
        self._is_timed = cell.shape in TIMED
        inputs = {"diamond": ("in", "more"), "join": ("in", "more"), STREAM: ()}
        self._inputs = inputs.get(cell.shape, ("in",))
        contents = {"diamond": ("totals", "copies"), STREAM: ("rows",), **dict.fromkeys(TIMED, ("results", "late"))}
        self._contents = contents.get(cell.shape, ("totals",))
        self._to_kafka = self._contents if cell.sinks in ("kafka", "both") else ()
        self._to_postgres = self._contents if cell.sinks in ("postgres", "both") else ()
        self._to_lake = self._contents if cell.sinks in LAKES else ()
        self._lake = self._folder / "lake"
        self._lake.mkdir()
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
        for each in self._to_lake:
            in_lake = LakeReader(self._lake, cell.sinks, each)
            self._read(f"{cell.sinks} {each}", in_lake, in_lake.close)

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

    def _in_lake(self, content: str) -> list[Seen]:
        """In the order of each customer's sums, which grow: a table of a lake has none of its own."""
        with closing(LakeReader(self._lake, self.cell.sinks, content)) as rows:
            return sorted(rows(), key=lambda seen: seen.row[1:])

    # --- what happens -------------------------------------------------------------------------------------------

    def feed(self, number: int = FEED) -> None:
        if self._is_timed:
            self._produce([record(event) for event in events(len(self.fed), number)])
        else:
            self._produce(orders(number, first=len(self.fed)))

    def _produce(self, more: Sequence[tuple[str, str]]) -> None:
        for place, each in enumerate(self._inputs):
            self.servers.kafka.produce(f"{self.name}-{each}", more[place :: len(self._inputs)])
        self.fed += more

    def feed_last(self) -> None:
        """The last records; none of event time leaves anything open."""
        self.feed()
        if self._is_timed:
            for partition in range(IN_PARTITIONS):
                for number, each in enumerate(self._inputs):
                    event = ending(number * IN_PARTITIONS + partition)
                    self.servers.kafka.produce(f"{self.name}-{each}", [record(event)], partition)

    @property
    def _target(self) -> tuple[str, ...]:
        parameters = {"name": self.name, "shape": self.cell.shape, "sinks": self.cell.sinks}
        return "crossing:crossing", *(part for item in parameters.items() for part in ("--param", "=".join(item)))

    @property
    def _env(self) -> dict[str, str]:
        dsn = self.servers.postgres.dsn("postgres")
        return {"PYTHONPATH": str(HERE), DSN: dsn, LAKE: str(self._lake)}

    def run(self, *arguments: str, parallelism: int | None = None, armed: Mapping[str, str] | None = None) -> Run:
        begun = Run(
            self.servers.kafka.bootstrap_servers,
            *self._target,
            *SETTINGS,
            *("--parallelism", str(parallelism or self.cell.parallelism)),
            *(("--unaligned",) if self.cell.mode == UNALIGNED else ()),
            *arguments,
            env={**self._env, **(armed or {})},
        )
        self.runs.append(begun)
        return begun

    def finish(self, *options: str, parallelism: int | None = None) -> None:
        last = self.run("--until", "latest", *options, parallelism=parallelism)
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

    def armed(self, way: AtFailpoint) -> dict[str, str]:
        return {
            "EXACTLYONCE_FAILPOINTS": f"{way.point}={self.cell.action}@{way.nth}",
            "EXACTLYONCE_FAILPOINTS_FIRED": str(self._folder),
        }

    def meet(self, way: AtFailpoint, run: Run) -> None:
        """Feed *run* until a process of it has met the failpoint."""

        def go_on() -> None:
            assert run.process.poll() is None or self._fired(way), run.said
            self.feed(100)

        until(lambda: self._fired(way), meanwhile=go_on, told=lambda: run.said, pause_s=0.2)

    def _fired(self, way: AtFailpoint) -> bool:
        return (self._folder / way.point).exists()

    def crash(self, way: Crash) -> None:
        self.feed()
        if way.crowd:
            self._produce([record(event) for event in crowd(len(self.fed), way.crowd)])
        run = self.run(armed={**self.armed(way), **({SLOW: "0.005"} if way.slow else {})})
        self.meet(way, run)
        if not way.in_coordinator:
            for _ in range(2):  # a worker that has acknowledged does not keep its checkpoint from committing
                run.await_step("deployed")
            self.await_output(run)
            self.end(run)
        elif self.cell.action == "stop":
            self._take_over(run)
        else:
            self._await_end(run)

    def begin_from_savepoint(self, way: FromSavepoint) -> None:
        """A run ends with a savepoint; the next one meets the failpoint, and the same command begins once more."""
        first = self.run()
        self.await_output(first)
        taken = self._command("savepoint", self.name, "--stop", "--json")
        assert taken.returncode == 0, taken.stderr
        number = json.loads(taken.stdout)["checkpoint"]
        assert first.wait() == 0, first.said
        options = ("--from-savepoint", str(number))
        run = self.run(*options, armed=self.armed(way))
        self.meet(way, run)
        if self.cell.action == "stop":
            self._take_over(run, *options)
        else:
            self._await_end(run)
            self.feed()
            self.finish(*options)

    def stand_by(self, way: TakenOver) -> None:
        """A leader meets the failpoint while another run waits, which takes over by itself."""
        self.feed()
        leader = self.run(armed=self.armed(way))
        leader.await_step("deployed")
        standby = self.run("--standby")
        standby.await_event(lambda event: event["event"] == "standby")
        self.meet(way, leader)
        if self.cell.action != "stop":
            self._await_end(leader)
        self.await_output(standby)
        if self.cell.action == "stop":
            leader.process.send_signal(signal.SIGCONT)
            assert leader.wait() == FENCED, leader.said
        self.end(standby)

    def work_bounded(self, way: Bounded) -> None:
        """A backfill in chunks meets the failpoint; the same command goes on, to the same end."""
        self.feed(CHUNKS * CHUNK)
        said = self._backfill(self.armed(way)).stderr
        assert self._fired(way), said
        ended = self._backfill({})
        assert ended.returncode == 0, ended.stderr

    def _backfill(self, armed: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        options = ["--on", self.cell.mode, "--chunk-records", str(CHUNK), "--parallelism", str(self.cell.parallelism)]
        options += ["--master", "local[2]"] if self.cell.mode == ON_SPARK else []
        return self._command("backfill", *self._target, *options, env={**self._env, **armed})

    def _command(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """In a process of its own: cells are threads, which share where output goes."""
        command = [sys.executable, "-m", "exactlyonce.cli.main", *words]
        command += ["--bootstrap-servers", self.servers.kafka.bootstrap_servers]
        env = {**os.environ, **(env or {})}
        return subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, timeout=LIMIT_S)

    def stream(self, way: Streamed) -> None:
        """A query of Spark that copies files meets the failpoint: its driver goes on, or dies and another goes on."""
        folder, file_rows = self._folder / "query", orders(FILES * FEED)
        (folder / "in").mkdir(parents=True)
        for number in range(FILES):
            file = folder / "in" / f"{number}.json"
            file.write_text("".join(f"{value}\n" for _, value in file_rows[number::FILES]))
            os.utime(file, (number + 1, number + 1))  # the query reads them in this order
        self.fed += file_rows
        command = ("sink_job.py", str(folder), json.dumps(self._write_options()))
        with Driver(folder, f"{way.point}={self.cell.action}@{way.nth}", *command) as driver:
            if self.cell.action == "stop":
                driver.await_fired(way.point)
            else:
                driver.end()
        assert (driver.fired / way.point).exists(), driver.said()
        if self.cell.action == "stop":
            with Driver(folder, "", *command) as driver:
                driver.end()

    def _write_options(self) -> dict[str, str]:
        (content,), sinks = self._contents, self.cell.sinks
        (self._folder / "dsn").write_text(self.servers.postgres.dsn("postgres"))
        of_sink = {
            "kafka": {"topic": f"{self.name}-{content}"},
            "postgres": {"table": table(self.name, content), "dsn": f"file:{self._folder / 'dsn'}"},
            "delta": {"path": str(self._lake / content), "create": "true"},
            "iceberg": {
                "table": f"lake.{content}", "catalog": json.dumps(iceberg_catalog(str(self._lake))), "create": "true"
            },
        }[sinks]  # fmt: skip
        kind = {} if sinks == "kafka" else {"sink": sinks}
        return {
            "sinkId": self.name, "kafka.bootstrap.servers": self.servers.kafka.bootstrap_servers, **kind, **of_sink
        }  # fmt: skip

    def _await_end(self, run: Run) -> None:
        if self.cell.action == "kill":
            assert run.wait() == -signal.SIGKILL
        else:
            assert run.wait() not in (0, FENCED), "a defect of its own ends a coordinator"

    def _take_over(self, sleeper: Run, *options: str) -> None:
        await_stopped(sleeper.process.pid)
        self.feed()
        self.finish(*options)
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
        found = {f"{self.name}-{each}": (each, self._in_kafka(each)) for each in self._to_kafka}
        found |= {table(self.name, each): (each, self._in_postgres(each)) for each in self._to_postgres}
        found |= {f"{self.cell.sinks} {each}": (each, self._in_lake(each)) for each in self._to_lake}
        rows = {where: (content, [row for _, row in seen]) for where, (content, seen) in found.items()}
        if self._is_timed:
            self._assert_results({content: Counter(of_content) for content, of_content in rows.values()})
        else:
            assert_totals(rows, self.fed)
        if self.cell.shape in IN_ORDER:
            partitions = [part for each in self._inputs for part in self._read_input(each)]
            ids = [[values(order)[0] for order in part] for part in partitions]
            for where, (_, of_content) in rows.items():
                assert_order(of_content, ids, where)
        for where, (_, seen) in found.items():
            self._readers[where].assert_kept(dict(seen))
        left = unreferenced_blocks(self.servers.kafka, self.name)
        assert left == set(), f"blocks that nobody refers to: {left}"
        if self._to_postgres and self.cell.shape != STREAM:
            decided = newest_checkpoint(self.servers.kafka, self.name).ledger
            assert_ledger(self.servers.postgres, self.name, decided)
        return sum(len(seen) for _, seen in found.values())

    def _read_input(self, topic: str) -> list[list[bytes | None]]:
        """The values of each partition."""
        partitions: list[list[bytes | None]] = [[] for _ in range(IN_PARTITIONS)]
        for fed in self.servers.kafka.read_committed(f"{self.name}-{topic}"):
            partitions[fed.partition].append(fed.value)
        return partitions

    def _assert_results(self, found: Mapping[str, Counter[Row]]) -> None:
        topics = [[[event_of(value) for value in part] for part in self._read_input(each)] for each in self._inputs]
        results, late = expected(self.cell.shape, topics)
        assert min(len(results), len(late)) > SOME, "the input has results and late events"
        assert_rows(found["results"], results, "results")
        assert_rows(found["late"], late, "late events")


def assert_totals(found: Mapping[str, tuple[str, Sequence[Row]]], fed: Fed) -> None:
    """Each place of *found* has the rows of its content that come of the orders *fed*; all totals are the same."""
    totals = list[dict[int, Row]]()
    for where, (content, rows) in found.items():
        if content == "totals":
            assert_updates([dict(zip(("id", "customer", "sum"), row, strict=True)) for row in rows], fed, where)
            totals.append({row[0]: row for row in rows})
        else:
            assert_rows(Counter(rows), Counter(values(value.encode()) for _, value in fed), where)
    assert all(each == totals[0] for each in totals), "all stores have the same totals"


def record(event: Event) -> tuple[str, str]:
    return str(event.id % KEYS), json.dumps(event._asdict())


def try_cell(cell: Cell, servers: Servers) -> int:
    trial = Trial(cell, servers)
    try:
        way = cell.way
        if isinstance(way, Request):
            trial.lose(way)
        elif isinstance(way, FromSavepoint):
            trial.begin_from_savepoint(way)
        elif isinstance(way, TakenOver):
            trial.stand_by(way)
        elif isinstance(way, Bounded):
            trial.work_bounded(way)
        elif isinstance(way, Crash):
            trial.crash(way)
        if isinstance(way, Streamed):
            trial.stream(way)
        else:
            trial.feed_last()
            trial.finish(parallelism=3 - cell.parallelism)
        verified = trial.assert_exact()
        trial.forget()
        return verified
    finally:
        trial.close()
        (trial.servers.folder / f"{trial.name}.json").write_text(
            json.dumps([{"said": run.said, "events": run.events} for run in trial.runs])
        )

"""Rounds of kills: one pipeline of captured changes each, whose processes and servers are killed by a seed's draws.

Everything that a round kills, and when, is drawn from the seed and the round's number. A life that makes no progress
within `LIFE_S` is hung, which is a failure. At the end all writers stop, the pipeline reads to the newest change, and
the judge compares: topics with audits, topics and copies with tables.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
from change_bank import LAST_KEYS, TOTAL, Writers, audit_of, fill, versions_in
from change_judge import Said, judge, mutated, newest
from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition
from failing_over import Bank, is_behind, is_left_out, is_removed
from killed_runs import AWAY, LIFE_S, Failed, KilledRuns, pause
from plain_consumer import plain_consumer
from running import Run
from waiting import until

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.testing.cluster import OwnCluster
from exactlyonce.testing.servers.postgres import PostgresServer

HERE = Path(__file__).parent
PAGE_ROWS, ROWS_A_SECOND = 1_000, 8_000
HALT = 6
"""Exit code: it cannot go on."""
DECK = (
    *(["run"] * 7), *(["step"] * 4), *(["worker"] * 3), *(["sender"] * 2), *(["backend"] * 2), *(["server"] * 2),
    *(["stop"] * 2), *(["broker"] * 1), *(["copy"] * 1), *(["failover"] * 2),
)  # fmt: skip
"""The kills of a round, in an order that is drawn."""
LAST_ACTS = ("behind", "without the slot", "without its log", "without its snapshot")
"""After the judge, by the round's number: failovers after which a run has to halt."""
KINDS = {
    "run": "SIGKILL to the run, at any moment",
    "step": "SIGKILL to a process at a step of the protocol",
    "worker": "SIGKILL to a worker",
    "sender": "pg_terminate_backend of the walsender",
    "backend": "SIGKILL to the walsender: the server starts itself anew",
    "server": "SIGKILL to the whole server",
    "stop": "pg_ctl stop -m immediate",
    "broker": "SIGKILL to the broker",
    "copy": "SIGKILL to the server with the copies",
    "failover": "the primary is killed, its standby promoted, with the slot",
    "failover behind": "likewise, to a standby that lacks what was read: the run halts",
    "failover without the slot": "likewise, to one without the slot: the run halts",
    "failover without its snapshot": "likewise, with the slot alone, so that transactions would be left out: it halts",
    "failover without its log": "likewise, to one that was copied later, and lacks the slot's log: the run halts",
}


class Halted(Exception):
    """The run has halted, rightly: a failover has lost what was read."""


class World:
    """The servers, which all rounds share."""

    def __init__(self, folder: Path) -> None:
        self.bank = Bank()
        self.copy = PostgresServer()
        self.copy.start()
        self.broker = EmbeddedBroker(folder / "broker", port=0, lifetime="process")
        self.broker.start()
        self.kafka = OwnCluster(self.broker)

    def remove(self) -> None:
        self.bank.remove()
        self.copy.remove()
        self.broker.kill()


class Tail:
    """A read_committed reader of the topics, through all faults."""

    def __init__(self, servers: str, topics: dict[str, str]) -> None:
        self.said: dict[str, list[Said]] = {topic: [] for topic in topics}
        self.paged: dict[str, bool] = dict.fromkeys(topics, False)
        self._topics, self._is_over = topics, threading.Event()
        self._failure: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(servers,), daemon=True)
        self._thread.start()

    def _read(self, servers: str) -> None:
        with closing(plain_consumer(servers)) as reader:
            reader.assign([TopicPartition(topic, 0, OFFSET_BEGINNING) for topic in self._topics])
            while not self._is_over.is_set():
                message = reader.poll(0.2)
                if message is None or message.error():
                    continue
                topic, said = message.topic() or "", said_by(message)
                self.said[topic].append(said)
                if said.key == self._topics[topic]:
                    self.paged[topic] = True

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


def said_by(message: Any) -> Said:
    value, headers = message.value(), dict(message.headers())
    version = None if value is None else json.loads(value)["version"]
    return Said(message.key().decode(), version, headers["op"].decode(), int(headers["lsn"]))


def everything_in(servers: str, topic: str) -> list[Said]:
    """All committed messages of *topic*, from its beginning to its end now."""
    said: list[Said] = []
    with closing(plain_consumer(servers)) as reader:
        _, end = reader.get_watermark_offsets(TopicPartition(topic, 0), 30)
        reader.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        limit = time.monotonic() + LIFE_S
        while reader.position([TopicPartition(topic, 0)])[0].offset < end:
            message = reader.poll(1)
            if message is not None and not message.error():
                said.append(said_by(message))
            elif time.monotonic() > limit:
                raise Failed(f"read_committed readers of {topic} do not come to its end {end}")
    return said


class Round(KilledRuns):
    steps = (*KilledRuns.steps, "store-committing", "store-committed")

    def __init__(
        self, world: World, evidence: Path, seed: int, number: int, kinds: Sequence[str] = DECK
    ) -> None:  # fmt: skip
        name = f"kills-{seed}-{number}"
        env = {
            "SHOP_DSN": world.bank.dsn, "COPY_DSN": world.copy.dsn(),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")])),
        }  # fmt: skip
        params = {"name": name, "page_rows": PAGE_ROWS, "rows_a_second": ROWS_A_SECOND}
        super().__init__(
            name, world.broker, evidence, "change_pipelines:make", seed=seed, number=number, env=env, params=params
        )
        self.world, self.halted = world, ""
        self.slot = f"exactlyonce_{name}".replace("-", "_")
        self.topics = {f"{name}-{table}": key for table, key in LAST_KEYS.items()}
        self.phases: Counter[str] = Counter()
        self.messages = 0
        self._kinds = [*kinds]
        self.luck.shuffle(self._kinds)
        self._paged: dict[str, int] = {}

    # --- the round ----------------------------------------------------------------------------------------------------

    def play(self, mutant: str = "") -> list[str]:
        """The differences that the judge has found; none if the run has rightly halted: `halted` says why."""
        try:
            return self._played_to_end(mutant)
        except Halted as halt:
            self.halted = str(halt)
            return []

    def _played_to_end(self, mutant: str) -> list[str]:
        self._begin()
        for kind in self._kinds:
            if self.luck.random() < 0.3:
                self.writers.write_large()
            getattr(self, f"_kill_{kind}")()
            self._look()
        wrong = self._judged(mutant)
        act = LAST_ACTS[self.number % len(LAST_ACTS)]
        if not wrong:
            self._last_act(act)
        return wrong

    def _begin(self) -> None:
        bank = self.world.bank
        fill(bank.dsn)
        for table in LAST_KEYS:
            self.world.copy.execute(f"DROP TABLE IF EXISTS {table}")
        for topic in self.topics:
            self.world.kafka.create_topic(topic, 1, **{"cleanup.policy": "compact", "min.compaction.lag.ms": 10**9})
        self.tail = Tail(self.world.broker.bootstrap_servers, self.topics)
        self.writers = Writers(bank.dsn, self.number)
        self._command("changes", "setup", "change_pipelines:make", *self._params)

    def close(self) -> None:
        super().close()
        if hasattr(self, "tail"):
            self.tail.end()
        if hasattr(self, "writers"):
            self.writers.end()
        self.world.bank.drop_slot(self.slot)

    def _note(self, kind: str, how: str = "") -> None:
        """Count a kill, and where the pipeline was."""
        phase = "pages" if not all(self.tail.paged.values()) else "stream"
        self.phases[phase] += 1
        super()._note(kind, f"{how}, at {phase}".removeprefix(", "))

    def _look(self) -> None:
        """Note how far the audit was when a table had come as a whole."""
        if self.writers.unexpected:
            raise Failed(f"a writer has failed: {self.writers.unexpected}")
        for topic, is_paged in self.tail.paged.items():
            if is_paged and topic not in self._paged:
                ((number,),) = self.world.bank.ask("SELECT nextval('audit_n_seq')")
                self._paged[topic] = number

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _command(self, *words: str) -> None:
        command = [sys.executable, "-m", "exactlyonce.cli.main", *words]
        done = subprocess.run(
            command, cwd=HERE, env={**os.environ, **self._env}, capture_output=True, text=True, timeout=LIFE_S
        )
        if done.returncode:
            raise Failed(f"{words} ended with {done.returncode}: {done.stderr}")

    def _judge_end(self, run: Run) -> None:
        """Of a run that has ended by itself."""
        code = run.wait()
        if code == HALT and is_behind(run.said, self.world.bank.primary):
            raise Halted(run.said)
        super()._judge_end(run)

    # --- kills --------------------------------------------------------------------------------------------------------

    def _holder(self) -> int:
        """The walsender of the slot, at some moment after it began."""
        holder = self.world.bank.holder
        self._until(lambda: holder(self.slot), "a reader of the slot")
        pause(self.luck.uniform(0, 1))
        while True:
            self._until(lambda: holder(self.slot), "a reader of the slot")
            if (pid := holder(self.slot)) is not None:
                return pid

    def _kill_sender(self) -> None:
        pid = self._holder()
        self._note("sender")
        self.world.bank.ask("SELECT pg_terminate_backend(%s, 10000)", pid)
        self._after_fault()

    def _kill_backend(self) -> None:
        pid = self._holder()
        self._note("backend")
        os.kill(pid, signal.SIGKILL)
        self._after_fault()

    def _kill_server(self) -> None:
        self._alive()
        pause(self.luck.uniform(0, 2))
        self._note("server")
        self.world.bank.primary.kill()
        pause(self.luck.choice((0, 0, 0.5, 2)))
        self.world.bank.primary.start()
        self._after_fault()

    def _kill_stop(self) -> None:
        self._alive()
        pause(self.luck.uniform(0, 2))
        self._note("stop")
        self.world.bank.primary.stop("immediate")
        pause(self.luck.choice((0, 0, 0.5, 2)))
        self.world.bank.primary.start()
        self._after_fault()

    def _kill_copy(self) -> None:
        self._alive()
        pause(self.luck.uniform(0, 2))
        self._note("copy")
        self.world.copy.kill()
        self.world.copy.start()
        self._after_fault()

    def _kill_failover(self) -> None:
        """Mostly to a standby that has all; else to one that may lack what was read just now."""
        bank = self.world.bank
        while not bank.has_log(self.slot):
            bank.ask("CHECKPOINT")
            self._progress()
        self._alive()
        pause(self.luck.uniform(0, 2))
        how = self.luck.choice(("kill", "immediate"))
        if self.luck.random() < 0.75:
            with self.writers.paused():
                bank.await_standby()
                self._note("failover", how)
                bank.fail_over(self.slot, how)
        else:
            self._note("failover", f"{how}, beside writers")
            bank.fail_over(self.slot, how)
        try:
            self._after_fault()
        finally:
            bank.add_standby()

    def _last_act(self, act: str) -> None:
        """A failover after which going on would lose changes."""
        bank = self.world.bank
        self.writers = Writers(bank.dsn, self.number)
        self._start()
        self._progress()
        if act == "behind":
            bank.standby.stop("fast")
            bank.standby.copy_slot(self.slot, bank.primary)
            self._progress(2)
            self._note(f"failover {act}")
            bank.primary.kill()
            bank.promote()
        else:
            if act == "without its log":
                self._kill_now()
                bank.ask("SELECT pg_switch_wal()")
                bank.add_standby()
            if act == "without its snapshot":
                self._move_into_open_transaction()
            with self.writers.paused():
                bank.await_standby()
                self._note(f"failover {act}")
                is_whole = act != "without its snapshot"
                bank.fail_over(None if act == "without the slot" else self.slot, "kill", with_snapshots=is_whole)
        run = self.runs[-1] if self.runs[-1].process.poll() is None else self._start()
        while (code := self._ended(run, f"halt after a failover {act}")) == AWAY:
            run = self._start()
        rule = {"behind": is_behind, "without its log": is_removed, "without its snapshot": is_left_out}.get(act)
        if code != HALT or (rule is not None and not rule(run.said, bank.primary)):
            raise Failed(f"after a failover {act} the run ended with {code}: {run.said[-3000:]}")
        bank.add_standby()

    def _move_into_open_transaction(self) -> None:
        """Have the slot begin where a transaction was open, and more come after it than the pipeline has read."""
        bank = self.world.bank
        with psycopg.connect(bank.dsn) as session:
            session.execute("SELECT txid_current()")
            ((begun,),) = bank.ask("SELECT pg_current_wal_lsn()::text")
            moved = "SELECT restart_lsn > %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
            while bank.ask(moved, begun, self.slot) != [(True,)]:
                bank.ask("CHECKPOINT")
                self._progress()
            self._kill_now()
            committed = self.writers.committed
            until(lambda: self.writers.committed > committed + 20)

    # --- the verdict --------------------------------------------------------------------------------------------------

    def _judged(self, mutant: str) -> list[str]:
        """What is wrong once everything that was committed has been read."""
        self._until(lambda: all(self.tail.paged.values()), "the last page")
        self._progress()
        self.writers.end()
        self._await_end()
        wrong: list[str] = []
        servers = self.world.broker.bootstrap_servers
        with psycopg.connect(self.world.bank.dsn) as tables, psycopg.connect(self.world.copy.dsn()) as copies:
            for topic, table in zip(self.topics, LAST_KEYS, strict=True):
                messages = everything_in(servers, topic)
                self.messages += len(messages)
                seen = self.tail.said[topic]
                if seen != messages[: len(seen)]:
                    wrong.append(f"{topic}: a reader has seen other messages before")
                if mutant:
                    messages = mutated(messages, mutant)
                total = TOTAL if table == "accounts" else None
                found = judge(audit_of(tables, table), messages, self._paged[topic], total)
                wrong += [f"{topic}: {text}" for text in found]
                rows = versions_in(tables, table)
                if newest(messages) != rows:
                    wrong.append(f"{topic} as a table is not the table")
                if versions_in(copies, table) != rows:
                    wrong.append(f"the copy of {table} is not the table")
            ((total,),) = tables.execute("SELECT sum(amount) FROM accounts").fetchall()
            if total != TOTAL:
                wrong.append(f"the writers' sum is {total}: they are wrong themselves")
        return wrong

    def result(self) -> dict[str, Any]:
        return {
            **super().result(), "kills": dict(self.kills), "phases": dict(self.phases), "messages": self.messages,
            "halted": self.halted,
        }  # fmt: skip

    def keep(self, wrong: list[str]) -> None:
        super().keep(wrong)
        folder = self.evidence
        (folder / "server.json").write_text(json.dumps(self.world.bank.evidence(), indent=1))
        for name, server in (("primary", self.world.bank.primary), ("standby", self.world.bank.standby)):
            shutil.copy(server.folder / "log", folder / f"{name}.log")
        try:
            with psycopg.connect(self.world.bank.dsn) as tables:
                for topic, table in zip(self.topics, LAST_KEYS, strict=True):
                    found = {"audit": audit_of(tables, table), "topic": self.tail.said[topic]}
                    (folder / f"{table}.json").write_text(json.dumps({**found, "paged": self._paged.get(topic)}))
        except (psycopg.Error, KafkaException) as error:
            (folder / "tables.txt").write_text(repr(error))

"""The faults of the soak, each drawn from the seed. One counts only once it was seen to have met its target."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kafka_proxy import END_TXN, PRODUCE, Fate, Fault
from psycopg import OperationalError

if TYPE_CHECKING:
    import random

    from soak_feeder import Feeder
    from soak_lives import Lives
    from soak_servers import Servers

FETCH, METADATA, INIT_PRODUCER_ID, ADD_PARTITIONS = 1, 3, 22, 24
REQUESTS = {
    "produce": PRODUCE, "end of a transaction": END_TXN, "fetch": FETCH, "metadata": METADATA,
    "id of a producer": INIT_PRODUCER_ID, "partitions of a transaction": ADD_PARTITIONS,
}  # fmt: skip
MET_S = 5.0
"""A request of the kind comes within that time, or the fault has met nothing."""
PARTITIONS_MAX = 6
AHEAD_LOG = 3.5
"""Brokers refuse records of clocks that are an hour ahead of theirs (`message.timestamp.after.max.ms`): 53 minutes."""
WEIGHTS = {
    "request": 16, "network": 3, "run_killed": 3, "worker_killed": 3, "worker_stopped": 3, "run_stopped": 2,
    "taken_over": 1, "run_ended": 2, "broker_killed": 1, "broker_restarted": 1, "broker_stopped": 2, "broker_disk": 1,
    "postgres_killed": 2, "postgres_stopped": 2, "sessions_ended": 3, "lake_disk": 3, "clock": 5, "partitions": 1,
}  # fmt: skip
KINDS = {
    "request": "a request to the broker, or its answer, is lost or late",
    "network": "the network to the broker is cut for 1 to 4 s",
    "step": "SIGKILL or SIGSTOP to a process at a step of the protocol",
    "run_killed": "SIGKILL to the run",
    "worker_killed": "SIGKILL to a worker",
    "worker_stopped": "SIGSTOP to a worker, for up to 12 s",
    "run_stopped": "SIGSTOP to the leader, for up to 12 s",
    "taken_over": "SIGSTOP to the leader, and another run takes over; it wakes up then",
    "run_ended": "SIGTERM to the run, and a start at another parallelism",
    "broker_killed": "SIGKILL to the broker",
    "broker_restarted": "a clean restart of the broker",
    "broker_stopped": "SIGSTOP to the broker, for up to 8 s",
    "broker_disk": "the broker's disk is full: it ends, and starts again once there is room",
    "postgres_killed": "SIGKILL to PostgreSQL",
    "postgres_stopped": "SIGSTOP to PostgreSQL, for up to 8 s",
    "sessions_ended": "pg_terminate_backend of all sessions of the run",
    "lake_disk": "the disk of the lake and of the state's files is full, for 1 to 5 s",
    "clock": "the clock of all processes of the run is moved, by up to a day back or 50 minutes ahead",
    "partitions": "a topic of the input gets another partition",
}


class Faults:
    def __init__(
        self, servers: Servers, lives: Lives, feeder: Feeder, luck: random.Random, note: Callable[[str, str], None]
    ) -> None:
        """*note* takes a fault's kind, and how it was."""
        self._servers, self._lives, self._feeder, self._luck, self._note = servers, lives, feeder, luck, note
        self._armed: list[tuple[str, Fault, float]] = []
        self._weights = dict(WEIGHTS)
        if servers.lake_disk is None:
            self._weights.update(lake_disk=0, broker_disk=0)
        if servers.movable_clock is None:
            self._weights["clock"] = 0

    def one(self) -> str:
        """Let one fault happen; its kind. Returns once it is over, but for those of requests."""
        kind = self._luck.choices([*self._weights], [*self._weights.values()])[0]
        getattr(self, f"_{kind}")()
        return kind

    def look(self) -> None:
        """Count requests that a fault has met, and give up those that none has."""
        for name, fault, deadline_s in list(self._armed):
            if fault.met.is_set():
                self._note("request", f"{name}: {fault.fate.value}")
            if fault.met.is_set() or time.monotonic() > deadline_s:
                self._armed.remove((name, fault, deadline_s))
                if fault.fate not in (Fate.LATE, Fate.ANSWER_LATE) or not fault.met.is_set():
                    self._servers.proxy.disarm(fault)
                else:
                    self._lives.later(self._luck.uniform(0.2, 3), fault.released.set)

    def _pause(self, longest_s: float, shortest_s: float = 0.3) -> str:
        seconds = self._luck.uniform(shortest_s, longest_s)
        self._lives.pause(seconds)
        return f"{seconds:.1f} s"

    # --- the network ------------------------------------------------------------------------------------------------

    def _request(self) -> None:
        name = self._luck.choice([*REQUESTS])
        fault = self._servers.proxy.arm(Fault(REQUESTS[name], self._luck.choice([*Fate])))
        self._armed.append((name, fault, time.monotonic() + MET_S))

    def _network(self) -> None:
        fault = self._servers.proxy.arm(Fault(self._luck.choice([*REQUESTS.values()]), Fate.REQUEST_LOST, dark=True))
        self._lives.pause(MET_S, until=fault.met.is_set)
        if fault.met.is_set():
            self._note("network", self._pause(4, 1))
        self._servers.proxy.heal()
        self._armed.clear()

    # --- processes of the run ---------------------------------------------------------------------------------------

    def _run_killed(self) -> None:
        if self._lives.kill():
            self._note("run_killed", "")

    def _worker_killed(self) -> None:
        if (pid := self._worker()) is not None and _signal(pid, signal.SIGKILL):
            self._note("worker_killed", "")

    def _worker(self) -> int | None:
        workers = self._lives.workers()
        return self._luck.choice(workers) if workers else None

    def _worker_stopped(self) -> None:
        if (pid := self._worker()) is not None:
            self._stop("worker_stopped", pid, 12)

    def _run_stopped(self) -> None:
        if (pid := self._lives.pid) is not None:
            self._stop("run_stopped", pid, 12)

    def _stop(self, kind: str, pid: int, longest_s: float) -> None:
        if _signal(pid, signal.SIGSTOP):
            self._note(kind, self._pause(longest_s))
            _signal(pid, signal.SIGCONT)

    def _taken_over(self) -> None:
        if self._lives.take_over():
            self._note("taken_over", "")

    def _run_ended(self) -> None:
        if self._lives.end():
            self._note("run_ended", "")

    # --- servers ----------------------------------------------------------------------------------------------------

    def _broker_killed(self) -> None:
        self._note("broker_killed", "")
        self._servers.broker.kill()
        self._pause(3)
        self._servers.broker.start()

    def _broker_restarted(self) -> None:
        self._note("broker_restarted", "")
        self._servers.broker.restart()

    def _broker_stopped(self) -> None:
        self._servers.signal_broker(signal.SIGSTOP)
        self._note("broker_stopped", self._pause(8))
        self._servers.signal_broker(signal.SIGCONT)

    def _broker_disk(self) -> None:
        disk, broker = self._servers.broker_disk, self._servers.broker
        assert disk is not None
        if disk.fill():
            self._lives.pause(10, until=lambda: not broker.status().running)
            if not broker.status().running:
                self._note("broker_disk", "")
        broker.kill()
        disk.free()
        broker.start()

    def _postgres_killed(self) -> None:
        self._servers.postgres.kill()
        self._note("postgres_killed", self._pause(4))
        self._servers.postgres.start()

    def _postgres_stopped(self) -> None:
        self._servers.postgres.pause()
        self._note("postgres_stopped", self._pause(8))
        self._servers.postgres.go_on()

    def _sessions_ended(self) -> None:
        query = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND application_name <> 'soak' AND pid <> pg_backend_pid()"
        )
        try:
            ((count,),) = self._servers.postgres.execute(query)
        except OperationalError:
            return
        if count:
            self._note("sessions_ended", f"{count}")

    def _lake_disk(self) -> None:
        disk, lives = self._servers.lake_disk, self._lives
        assert disk is not None
        refusals = lives.refusals
        how = self._pause(5, 1) if disk.fill() else ""
        disk.free()
        if how:
            lives.pause(MET_S, until=lambda: lives.refusals > refusals)
            if lives.refusals > refusals:
                self._note("lake_disk", how)

    # --- surroundings -----------------------------------------------------------------------------------------------

    def _clock(self) -> None:
        is_ahead = self._luck.random() < 0.5
        offset_s = round((1 if is_ahead else -1) * 10 ** self._luck.uniform(0, AHEAD_LOG if is_ahead else 4.9), 1)
        if self._lives.move_clock(offset_s):
            self._note("clock", f"{offset_s} s from the broker's")

    def _partitions(self) -> None:
        topic = self._luck.randrange(2)
        count = self._feeder.partitions[topic] + 1
        if count <= PARTITIONS_MAX:
            self._servers.kafka.add_partitions(self._feeder.topics[topic], count)
            self._feeder.added(topic, count)
            self._note("partitions", f"{self._feeder.topics[topic]} has {count}")


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True

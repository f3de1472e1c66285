"""Rounds of kills whose histories are recorded: clients, one pipeline, faults drawn from a seed, then a verdict.

Feeders write the input, by idempotent and by transactional producers; pollers read input and outputs beside them. At
the end the pipeline reads to the newest record, and one more poller, of the same isolation, begins at the beginning.
What the pipeline did is in the history as its transactions: their records and outcomes are those of the broker's log,
and they have polled the inputs of what they sent.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edn import Keyword as K
from edn import lines, written
from history_checker import judged
from history_clients import (
    Client,
    Feeder,
    Ids,
    Pairs,
    Poller,
    Recorder,
    TransactionalFeeder,
    Written,
    logged,
    poll_all,
)
from history_mutants import MUTANTS, USERS
from killed_runs import LIFE_S, Failed, KilledRuns
from running import workers_of

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.testing.cluster import KafkaCluster

HERE = Path(__file__).parent
TOPICS = {"in": 3, "copies": 2, "counts": 4}
"""The partitions of each topic; the first one is the input."""
BY_USER = 1
"""The output whose key is the user: counts."""
DECK = (*(["run"] * 3), *(["step"] * 4), *(["worker"] * 2), *(["zombie"] * 2), *(["broker"] * 1))
"""The faults of a round, in an order that is drawn; between any two the number of workers may change."""
KINDS = {
    "run": "SIGKILL to the run, at any moment",
    "step": "SIGKILL to a process at a step of the protocol",
    "worker": "SIGKILL to a worker",
    "zombie": "SIGSTOP to a run, SIGCONT once another one has committed",
    "broker": "SIGKILL to the broker",
}
WEAKER = ("at_least_once", "read_uncommitted")
"""What promises less, so that the checker has to find anomalies: a delivery of the sinks, an isolation of pollers."""
FENCED = 5


class HistoryRound(KilledRuns):
    shapes = "1123"

    def __init__(
        self,
        broker: EmbeddedBroker,
        evidence: Path,
        seed: int,
        number: int,
        *,
        kinds: Sequence[str] = DECK,
        weaker: str = "",
        name: str = "",
    ) -> None:
        """*evidence*: the folder of the history, too. *weaker*: one of `WEAKER`. *name* begins the names of topics."""
        name = name or f"history-{seed}-{number}"
        self.isolation = "read_uncommitted" if weaker == "read_uncommitted" else "read_committed"
        self.is_exact = weaker != "at_least_once"
        if not self.is_exact:
            self.steps = tuple(step for step in self.steps if step != "coordinator-committed")  # it commits nothing
        super().__init__(
            name, broker, evidence, "history_pipelines:make", seed=seed, number=number,
            env={"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))},
            params={"name": name, "delivery": "exactly_once" if self.is_exact else "at_least_once"},
        )  # fmt: skip
        self.verdict: dict[str, Any] = {}
        """What the checker says of the history, once it is written."""
        self.recorder = Recorder([
            (f"{name}-{topic}", partition) for topic, count in TOPICS.items() for partition in range(count)
        ])  # fmt: skip
        self.clients: list[Client] = []
        self._kinds = [*kinds]
        self.luck.shuffle(self._kinds)

    def play(self, mutant: str = "") -> list[str]:
        self._begin()
        for kind in self._kinds:
            getattr(self, f"_kill_{kind}")()
            self._look()
        self._finish()
        self._write(self.evidence)
        self.verdict = judged(self.evidence, MUTANTS[mutant] if mutant else lambda maps: None)
        (self.evidence / "verdict.json").write_text(json.dumps(self.verdict, indent=1))
        return [f"{name}: {found['count']}" for name, found in self.verdict["anomalies"].items()]

    def _begin(self) -> None:
        cluster, servers = KafkaCluster(self.broker.bootstrap_servers), self.broker.bootstrap_servers
        for topic, partitions in TOPICS.items():
            cluster.create_topic(f"{self.name}-{topic}", partitions)
        keys, inputs, ids = range(len(self.recorder.partitions)), TOPICS["in"], Ids()
        for kind in (Feeder, Feeder, TransactionalFeeder, TransactionalFeeder):
            luck = random.Random(self.luck.random())
            self.clients.append(kind(self.recorder, servers, ids, inputs, luck))
        for polled in (keys[:inputs], keys[inputs:], keys):
            self.clients.append(Poller(self.recorder, servers, polled, self.isolation))

    def _look(self) -> None:
        if failures := [client.failure for client in self.clients if client.failure]:
            raise Failed(f"clients have failed: {failures}")

    def _is_progress(self, event: dict[str, Any]) -> bool:
        return super()._is_progress(event) or (event["event"] == "checkpoint" and not self.is_exact)

    def _note(self, kind: str, how: str = "") -> None:
        super()._note(kind, how)
        self.recorder.note("nemesis", "info", kind, how)

    def _kill_zombie(self) -> None:
        """Stop a run with its workers; it wakes once its successor has committed, and is fenced."""
        self._progress()
        zombie = self._alive()
        deployed = any(event.get("step") == "deployed" for event in list(zombie.events))
        processes = [zombie.process.pid, *(workers_of(zombie) if deployed else [])]
        processes = [pid for pid in processes if Path(f"/proc/{pid}").exists()]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        self._note("zombie", f"{len(processes)} processes")
        self._start()
        self._progress(self.luck.randrange(1, 3))
        for pid in reversed(processes):  # its workers first: they have no coordinator yet
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)
        if (code := self._ended(zombie, "notice that it was replaced")) != FENCED:
            raise Failed(f"a zombie ended with {code}: {zombie.said[-3000:]}")

    def _finish(self) -> None:
        """End the feeders, have the pipeline read all, and poll all."""
        self._progress()
        for client in self.clients:
            if isinstance(client, Feeder):
                client.end()
        self._await_end()
        for client in self.clients:
            client.end()
        self._look()
        servers = self.broker.bootstrap_servers
        try:
            self.found = poll_all(self.recorder, servers, self.isolation, LIFE_S)
        except TimeoutError as error:
            raise Failed(f"hung: {error}") from None

    # --- the history --------------------------------------------------------------------------------------------------

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        began, ended = self._transactions()
        history = [*began, *self.recorder.lines, *ended]
        indexed = ({K("index"): index, **line} for index, line in enumerate(history))
        (folder / "history.edn").write_text(lines(indexed))
        keys = iter(range(len(self.recorder.partitions)))
        inputs, *outputs = ([next(keys) for _ in range(count)] for count in TOPICS.values())
        test = {
            K("name"): self.name, K("seed"): self.seed, K("round"): self.number, K("isolation"): self.isolation,
            K("partitions"): {key: [*place] for key, place in enumerate(self.recorder.partitions)},
            K("pipeline"): {
                K("inputs"): inputs, K("outputs"): outputs, K("by-user"): [outputs[BY_USER]], K("users"): USERS,
            },
        }  # fmt: skip
        (folder / "test.edn").write_text(written(test) + "\n")

    def _transactions(self) -> tuple[list[dict[K, Any]], list[dict[K, Any]]]:
        """The pipeline's transactions, as the log has them, and the log's aborted offsets: where they begin, and end.

        Each is a process of its own, which runs beside all others: nothing tells when it began.
        """
        values: dict[int, dict[int, Any]] = {key: dict(map(tuple, pairs)) for key, pairs in self.found.items()}
        inputs = range(TOPICS["in"])
        places = {value: (key, offset) for key in inputs for offset, value in values.get(key, {}).items()}
        aborted: dict[int, list[list[int]]] = defaultdict(list)
        transactions: dict[Any, list[Written]] = defaultdict(list)
        for part in logged(self.recorder, self.broker.data_dir / "topics"):
            if part.outcome != "ok":
                aborted[part.key] += [[*range_] for range_ in part.ranges]
            if part.key not in inputs:
                transactions[part.transaction or (part.key, part.ranges[0])].append(part)
        sent: list[list[list[Any]]] = []
        for transaction, parts in transactions.items():
            if len({part.key for part in parts}) < len(parts):
                raise Failed(f"the log has two transactions of producer and epoch {transaction}")
            if any(part.outcome == "ok" for part in parts):  # of one that is torn, the rest is unseen
                sent.append([
                    [K("send"), part.key, [offset, values.get(part.key, {}).get(offset, f"not polled: {offset}")]]
                    for part in parts for first, last in part.ranges for offset in range(first, last + 1)
                ])  # fmt: skip
        operations: list[tuple[str, Any, Any]] = [
            ("txn", [[K("poll")]], [[K("poll"), self._inputs_of(sends, places)], *sends]) for sends in sent
        ]
        operations.append(("log", None, {key: sorted(ranges) for key, ranges in aborted.items()}))
        began, ended = [], []
        for f, invoked, value in operations:
            process = self.recorder.process()
            line = {K("process"): process, K("f"): K(f)}
            began.append({K("time"): 0, **line, K("type"): K("invoke"), K("value"): invoked})
            known = {K("rebalance-log"): [{K("keys"): [*inputs]}]}  # keyed records of an input are in many transactions
            ended.append({
                K("time"): self.recorder.now_ns(), **line, K("type"): K("ok"), K("value"): value,
                **(known if f == "txn" else {}),
            })  # fmt: skip
        return began, ended

    @staticmethod
    def _inputs_of(sends: Sequence[Sequence[Any]], places: dict[int, tuple[int, int]]) -> Pairs:
        polled: dict[int, dict[int, list[Any]]] = defaultdict(dict)
        for _, _, (_, value) in sends:
            id = value[0] if isinstance(value, list) else value
            if id in places:
                key, offset = places[id]
                polled[key][id] = [offset, id]
            elif isinstance(id, int):  # no poller saw it
                polled[id % USERS % TOPICS["in"]][id] = [None, id]
        return {key: sorted(pairs.values(), key=lambda pair: (pair[0] is None, pair)) for key, pairs in polled.items()}

    # --- the end ------------------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        return {
            **super().result(), "faults": dict(self.kills), "lines": len(self.recorder.lines),
            "operations": self.verdict.get("operations", 0), "records": self.verdict.get("records", 0),
            "outcomes": self.verdict.get("outcomes", {}),
        }  # fmt: skip

    def keep(self, wrong: list[str]) -> None:
        super().keep(wrong)
        if not (self.evidence / "history.edn").exists():
            (self.evidence / "part-of-history.edn").write_text(lines(self.recorder.lines))
        for topic in (self.broker.data_dir / "topics").glob(f"{self.name}*"):
            shutil.copytree(topic, self.evidence / "topics" / topic.name, dirs_exist_ok=True)

    def close(self) -> None:
        for client in self.clients:
            client.is_over.set()
        super().close()
        for client in self.clients:
            client.end()

"""A day of faults in an hour: one pipeline on real servers, through faults drawn from a seed; `make soak ARGS=real`.

    python tests/campaign.py soak [--seed 1] [--minutes 20] [--records 1700000] [--faults 340] [--mutant lose]

It goes on until one of these bounds is met, until Ctrl-C, or until something is found. Then faults stop, the pipeline
reads to the end, and all is judged. The result is a line of `.soak/results.jsonl`. If something was found, the exit
code is 1, and the evidence is in `.soak/SEED`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from soak_faults import KINDS, Faults
from soak_feeder import Feeder
from soak_judge import MUTANTS, VIEWS, Judge, Mutant, Progress, Verdict
from soak_lives import Lives
from soak_servers import Servers, mounts_are_ours
from soak_views import LakeView, TableView, TopicView, View

ROOT = Path(__file__).parents[3]
PARTITIONS = (3, 2)
"""Of the topics of orders and payments, to begin with."""
GAP_S = 0.8
"""The mean time from the end of a fault to the next."""
HELD_S = 15.0
"""Without output for so long, the next fault waits for some."""
AHEAD_MAX = 10_000
"""Orders that are fed, and not yet in totals: else a busy machine would only catch up."""
HOLD_LIMIT_S = 600
FIRST_S = 120
"""The first output is there by then."""
TABLES = """
CREATE TABLE totals (place bigserial PRIMARY KEY, id bigint NOT NULL, "user" text NOT NULL, cents bigint NOT NULL);
CREATE TABLE pairs (place bigserial PRIMARY KEY, "order" bigint NOT NULL, payment bigint);
"""


class Soak:
    def __init__(self, seed: int, folder: Path, evidence: Path, rate: int, stall_s: float, mutant: str) -> None:
        """Servers have their data in *folder*; *evidence* is what is kept."""
        self.seed, self.name = seed, f"soak-{seed}"
        self._schedule = evidence / "schedule"
        self.judge = Judge(*PARTITIONS)
        self._mutant = Mutant(mutant, 50)
        self.faults: Counter[str] = Counter()
        self.is_told_to_end = False
        self._began_s = self._said_s = time.monotonic()
        self.seconds = 0.0
        self.servers = Servers(folder, has_disks=mounts_are_ours())
        topics = [f"{self.name}-{each}" for each in ("orders", "payments")]
        for topic, partitions in zip(topics, PARTITIONS, strict=True):
            self.servers.kafka.create_topic(topic, partitions)
        for view in ("windows", "late", "pairs", "late-left", "late-right"):
            self.servers.kafka.create_topic(f"{self.name}-{view}", 3)
        self.servers.postgres.execute(TABLES)
        self.feeder = Feeder(
            self.servers.kafka.bootstrap_servers, self.name, seed, rate, PARTITIONS,
            may_write=lambda orders: orders < self.judge.rows["totals"] + AHEAD_MAX,
        )  # fmt: skip
        self.lives = Lives(
            self.servers, self.name, evidence, random.Random(f"lives/{seed}"), self._note, self.judge.find
        )
        self._faults = Faults(self.servers, self.lives, self.feeder, random.Random(f"faults/{seed}"), self._note)
        self.lives.meanwhile = self._look
        self.views = self._opened()
        self._progress = Progress(self.judge, stall_s, time.monotonic())

    def _opened(self) -> list[View]:
        servers, dsn = self.servers.kafka.bootstrap_servers, f"{self.servers.postgres.dsn()} application_name=soak"
        order, payment = ("id", "user", "at", "cents"), ("id", "order", "at")
        fields = {
            "windows": ("user", "start", "n", "cents"), "late": order, "pairs": ("order", "payment"),
            "late-left": order, "late-right": payment,
        }  # fmt: skip
        inputs = [("orders", order, self.judge.order), ("payments", payment, self.judge.payment)]
        return [
            *(
                TopicView(servers, f"{self.name}-{topic}", columns, partial(_each, take), with_partition=True)
                for topic, columns, take in inputs
            ),
            *(
                TopicView(servers, f"{self.name}-{view}", columns, partial(self._take, view), with_partition=False)
                for view, columns in fields.items()
            ),
            TableView(dsn, "totals", 'id, "user", cents', partial(self._take, "totals")),
            TableView(dsn, "pairs", '"order", payment', partial(self._take, "pair-rows")),
            LakeView(self.servers.lake, order, partial(self._take, "lake")),
        ]

    def _take(self, view: str, rows: list[tuple[Any, ...]]) -> None:
        self.judge.take(view, self._mutant(view, rows), self.feeder.newest_ms)

    def _note(self, kind: str, how: str) -> None:
        """Count a fault."""
        self.faults[kind] += 1
        with self._schedule.open("a") as schedule:
            schedule.write(f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._began_s:.2f} {kind} {how}\n")

    # --- the round --------------------------------------------------------------------------------------------------

    def play(self, minutes: float, records: int, faults: int) -> Verdict:
        for view in self.views:
            view.start()
        self.feeder.start()
        self.lives.pause(FIRST_S, until=lambda: self.judge.rows["totals"] > 0 or self._has_found())
        luck = random.Random(f"gaps/{self.seed}")
        while not self._is_over(minutes, records, faults):
            self._faults.one()
            self._progress.fault_ended_s = time.monotonic()
            gap_s = luck.expovariate(1 / GAP_S)
            self.lives.pause(gap_s)
            if self._progress.quiet_s > HELD_S:
                self.lives.pause(HOLD_LIMIT_S, until=lambda: self._progress.quiet_s < HELD_S or self._has_found())
        return self._judged()

    def _is_over(self, minutes: float, records: int, faults: int) -> bool:
        return (
            self.is_told_to_end or self._has_found() or time.monotonic() > self._began_s + 60 * minutes
            or self.feeder.orders + self.feeder.payments >= records or self.faults.total() >= faults
        )  # fmt: skip

    def _has_found(self) -> bool:
        return bool(self.judge.findings) or any(view.failure for view in self.views)

    def _look(self) -> None:
        self.feeder.check()
        self._faults.look()
        if stalled := self._progress.look(time.monotonic(), is_feeding=self.feeder.is_alive()):
            self.judge.find("stalled", stalled, "nothing came, and no fault was on")
            self._progress.fault_ended_s = time.monotonic()
        if time.monotonic() > self._said_s + 30:
            self._said_s = time.monotonic()
            print(self._said(), flush=True)

    def _said(self) -> str:
        fed, seconds = self.feeder.orders + self.feeder.payments, time.monotonic() - self._began_s
        read, rows = self.views[0].rows + self.views[1].rows, self.judge.rows
        return (
            f"{seconds:5.0f} s: {fed:,} records fed, {read:,} read, {rows['totals']:,} of {self.feeder.orders:,} orders"
            f" in totals, {rows['lake']:,} in the lake, {rows.total():,} rows seen;"
            f" {self.faults.total()} faults, {self.lives.count} lives; longest stall"
            f" {self._progress.longest_stall_s:.0f} s; found: {dict(self.judge.counts) or 'nothing'}"
        )

    def _judged(self) -> Verdict:
        self.seconds = time.monotonic() - self._began_s
        self.servers.heal()
        self._progress.fault_ended_s = time.monotonic()
        self.feeder.end()
        self.lives.move_clock(0)
        self.lives.finish()
        for view in self.views:
            view.end()
        for view in self.views:
            if difference := view.difference():
                self.judge.find("changed", view.name, difference)
        return self.judge.verdict()

    def result(self, verdict: Verdict) -> dict[str, Any]:
        return {
            "seed": self.seed, "seconds": round(self.seconds), "records": verdict.records, "rows": verdict.rows,
            "rows_of": {view: self.judge.rows[view] for view in VIEWS}, "faults": self.faults.total(),
            "kinds": dict(self.faults), "lives": self.lives.count, "checkpoints": self.lives.checkpoints,
            "codes": dict(self.lives.codes), "longest_stall_s": round(self._progress.longest_stall_s, 1),
            "longest_quiet_s": round(self._progress.longest_quiet_s, 1), "found": dict(self.judge.counts),
            "findings": [list(finding) for finding in verdict.findings], "at": time.strftime("%Y-%m-%d %H:%M"),
        }  # fmt: skip

    def close(self) -> None:
        self.lives.close()
        self.servers.remove()


def _each(take: Any, rows: list[tuple[Any, ...]]) -> None:
    for row in rows:
        take(*row)


def shown(result: dict[str, Any]) -> str:
    found = result["found"]
    counts = ", ".join(
        f"{kind} {found.get(kind, 0)}" for kind in ("lost", "doubled", "wrong", "changed", "ended", "stalled")
    )
    return "\n".join([
        *(f"{result['kinds'].get(kind, 0):5} {text}" for kind, text in KINDS.items()),
        f"seed {result['seed']}: {result['seconds'] / 60:.1f} minutes, {result['faults']} faults,"
        f" {result['lives']} lives; {result['records']:,} records and {result['rows']:,} rows verified",
        f"longest stall {result['longest_stall_s']} s, longest time without output {result['longest_quiet_s']} s",
        f"{counts}: {'clean' if not found else 'NOT CLEAN'}",
        *(f"  {' '.join(finding)}" for finding in result["findings"]),
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="how long (default: until told)")
    parser.add_argument("--records", type=int, default=sys.maxsize, help="how many are fed, at least")
    parser.add_argument("--faults", type=int, default=sys.maxsize, help="how many, at least")
    parser.add_argument("--rate", type=int, default=1_500, help="records a second (default: 1500)")
    parser.add_argument("--stall", type=float, default=60, help="seconds without output that are a stall (default: 60)")
    parser.add_argument("--evidence", type=Path, default=ROOT / ".soak", help="a folder (default: .soak)")
    parser.add_argument("--mutant", choices=MUTANTS, default="", help="plant a fault into what readers have seen")
    options = parser.parse_args()
    evidence = options.evidence / str(options.seed)
    shutil.rmtree(evidence, ignore_errors=True)
    evidence.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        soak = Soak(options.seed, Path(scratch), evidence, options.rate, options.stall, options.mutant)

        def end(*_: object) -> None:
            soak.is_told_to_end = True

        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGTERM, end)
        try:
            result = soak.result(soak.play(options.minutes, options.records, options.faults))
            (evidence / "result.json").write_text(json.dumps(result, indent=1))
            if result["found"]:
                soak.servers.keep(evidence)
        finally:
            soak.close()
    if not options.mutant:
        with (options.evidence / "results.jsonl").open("a") as lines:
            lines.write(json.dumps(result) + "\n")
    print(shown(result))
    if not result["found"]:
        shutil.rmtree(evidence)
    return 1 if result["found"] else 0

"""The runs of one pipeline, one after the other, which draws of a seed end; kills of captured changes and histories."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from running import Run, workers_of

from exactlyonce.connectors.embedded.broker import EmbeddedBroker

LIFE_S = 600
"""The limit for all that is to come of itself."""
AWAY = 4
"""Exit code: a server did not answer when the run started."""
STARTS = ("worker-restored", "coordinator-opened", "coordinator-swept")


class Failed(Exception):
    """The promise was broken, or a life hung."""


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class KilledRuns:
    """A round of a campaign. A subclass says what it kills beside runs, by methods `_kill_KIND`."""

    shapes = "112"
    """Numbers of workers that are drawn from."""
    steps: tuple[str, ...] = (
        "worker-barrier", "worker-aligned", "worker-frozen", "worker-flushed", "worker-acknowledged",
        "worker-finalized", "coordinator-triggered", "coordinator-checked", "coordinator-decided",
        "coordinator-committed", "coordinator-finalized",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        broker: EmbeddedBroker,
        evidence: Path,
        target: str,
        *,
        seed: int,
        number: int,
        env: Mapping[str, str],
        params: Mapping[str, object],
    ) -> None:
        """*target* is a pipeline with *params*, run in the environment *env*; *evidence* is the folder for what
        explains a failure. All is drawn from *seed* and the round's *number*."""
        self.name, self.broker, self.evidence = name, broker, evidence
        self.seed, self.number, self.luck = seed, number, random.Random(f"{seed}/{number}")
        self.kills: Counter[str] = Counter()
        self.schedule: list[str] = []
        self.runs: list[Run] = []
        self.restarts = 0
        """Runs that ended since a server did not answer when they started."""
        self.fired = Path(tempfile.mkdtemp(prefix=f"{name}-fired-"))
        self._began_s = time.monotonic()
        self._target = target
        self._params = [word for param, value in params.items() for word in ("--param", f"{param}={value}")]
        self._env = {
            **env, "EXACTLYONCE_FAILPOINTS_FIRED": str(self.fired),
            "PYTHONDONTWRITEBYTECODE": "",  # each of hundreds of processes would compile all source anew
        }  # fmt: skip

    # --- the round ----------------------------------------------------------------------------------------------------

    def played(self, mutant: str) -> dict[str, Any]:
        """Play the round with a *mutant*, and close it; its result, in which "wrong" lists what is."""
        wrong: list[str] = []
        try:
            wrong = self.play(mutant)
        except Exception as error:  # whatever it is, the evidence is kept
            wrong = [f"{type(error).__name__}: {error}"]
        finally:
            if wrong:
                self.keep(wrong)
            self.close()
        return {**self.result(), "wrong": wrong}

    def play(self, mutant: str = "") -> list[str]:
        """What is wrong, with the fault *mutant* planted into what is judged. Raises `Failed`."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        return {
            "seed": self.seed, "round": self.number, "lives": len(self.runs), "restarts": self.restarts,
            "schedule": self.schedule, "seconds": round(time.monotonic() - self._began_s),
        }  # fmt: skip

    def keep(self, wrong: list[str]) -> None:
        """Write what explains a failure."""
        self.evidence.mkdir(parents=True, exist_ok=True)
        (self.evidence / "round.json").write_text(json.dumps({"wrong": wrong, **self.result()}, indent=1))
        for number, run in enumerate(self.runs):
            lines = [*run.text, *map(json.dumps, run.events)]
            (self.evidence / f"run-{number}.log").write_text("\n".join(lines))

    def close(self) -> None:
        """End all of the round; the servers stay."""
        for run in self.runs:
            if run.process.poll() is None:
                run.kill()
        shutil.rmtree(self.fired)

    # --- what a subclass may add --------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Called again and again while something is awaited."""

    def _judge_end(self, run: Run) -> None:
        """*run* has ended by itself; raises, unless a server was away."""
        code = run.wait()
        if code != AWAY:
            raise Failed(f"the run ended with {code}: {run.said[-3000:]}")
        self.restarts += 1

    def _is_progress(self, event: dict[str, Any]) -> bool:
        """Whether *event* of a run tells of a checkpoint with records."""
        return event["event"] == "checkpoint" and bool(event["records_committed"])

    def _note(self, kind: str, how: str = "") -> None:
        """Count a kill."""
        self.kills[kind] += 1
        text = f"{time.monotonic() - self._began_s:.2f} {kind} {how}".rstrip()
        self.schedule.append(text)
        print(self.name, text, flush=True)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _start(self, *arguments: str, failpoint: str = "", with_workers: bool = False) -> Run:
        env = {**self._env, **({"EXACTLYONCE_FAILPOINTS": failpoint} if failpoint else {})}
        is_inline = not with_workers and self.luck.random() >= 0.4
        shape = ("--inline",) if is_inline else ("--parallelism", self.luck.choice(self.shapes))
        options = ("--checkpoint-interval", "300ms", *shape, *arguments)
        self.runs.append(Run(self.broker.bootstrap_servers, self._target, *self._params, *options, env=env))
        return self.runs[-1]

    def _alive(self) -> Run:
        """The run, started if there is none."""
        if not self.runs:
            return self._start()
        code = self.runs[-1].process.poll()
        if code is None:
            return self.runs[-1]
        if code != -signal.SIGKILL:
            self._judge_end(self.runs[-1])
        return self._start()

    def _until(self, condition: Callable[[], object], what: str) -> None:
        """Wait; a run that ends meanwhile is started again."""
        limit = time.monotonic() + LIFE_S
        while not condition():
            if time.monotonic() > limit:
                raise Failed(f"hung: {what} did not come within {LIFE_S} s")
            self._alive()
            self._look()
            pause(0.02)

    def _progress(self, checkpoints: int = 1) -> None:
        """Returns once records have been committed from now on."""

        def count() -> int:
            return sum(self._is_progress(event) for run in self.runs for event in list(run.events))

        before = count()
        self._until(lambda: count() >= before + checkpoints, "a checkpoint with records")

    def _ended(self, run: Run, what: str) -> int:
        """The exit code of *run*, which is to end by itself."""
        try:
            run.process.wait(LIFE_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"hung: the run did not {what} within {LIFE_S} s") from None
        return run.wait()

    def _await_end(self) -> None:
        """Have the run stop, and another one read to the newest record."""
        run = self._alive()
        run.process.send_signal(signal.SIGTERM)
        if self._ended(run, "end"):
            self._judge_end(run)
        limit = time.monotonic() + LIFE_S
        while self._ended(run := self._start("--until", "latest"), "end"):
            self._judge_end(run)
            if time.monotonic() > limit:
                raise Failed(f"hung: no run could begin within {LIFE_S} s")

    # --- kills --------------------------------------------------------------------------------------------------------

    def _kill_now(self, kind: str = "run", how: str = "") -> None:
        run = self._alive()
        self._note(kind, how)
        run.kill()

    def _kill_run(self) -> None:
        if self.luck.random() < 0.3:
            checkpoints = self.luck.randrange(1, 3)
            self._alive()
            self._progress(checkpoints)
            self._kill_now(how=f"after {checkpoints} checkpoints")
        else:
            self._alive()
            is_deployed = self.luck.random() < 0.6
            if is_deployed:
                self._until(lambda: any(e.get("step") == "restored" for e in list(self.runs[-1].events)), "a reader")
            wait_s = self.luck.uniform(0, 2) if is_deployed else self.luck.uniform(0.05, 5)
            pause(wait_s)
            self._kill_now(how=f"{wait_s:.2f} s after {'its reader' if is_deployed else 'its process'} began")

    def _kill_step(self) -> None:
        if self.runs and self.runs[-1].process.poll() is None:
            self._kill_now()
        is_start = self.luck.random() < 0.2
        step = self.luck.choice(STARTS if is_start else self.steps)
        nth = 1 if is_start else self.luck.randrange(1, 8)
        met = self.fired / step
        met.unlink(missing_ok=True)
        self._start(failpoint=f"{step}=kill@{nth}")
        limit = time.monotonic() + LIFE_S
        while not met.exists():
            if self.runs[-1].process.poll() not in (None, -signal.SIGKILL):
                self._judge_end(self.runs[-1])
                self._start(failpoint=f"{step}=kill@{nth}")
            if time.monotonic() > limit:
                raise Failed(f"hung: {step} was not met {nth} times within {LIFE_S} s")
            self._look()
            pause(0.01)
        self._note("step", f"{step}@{nth}")
        if step.startswith("coordinator"):
            self.runs[-1].wait()

    def _kill_worker(self) -> None:
        if self.runs and self.runs[-1].process.poll() is None:
            self._kill_now()
        self._start(with_workers=True)
        self._until(lambda: any(event.get("step") == "deployed" for event in list(self.runs[-1].events)), "a worker")
        pause(self.luck.uniform(0, 3))
        if workers := [pid for pid in workers_of(self.runs[-1]) if Path(f"/proc/{pid}").exists()]:
            self._note("worker")
            os.kill(self.luck.choice(workers), signal.SIGKILL)

    def _kill_broker(self) -> None:
        self._alive()
        pause(self.luck.uniform(0, 2))
        self._note("broker")
        self.broker.kill()
        self.broker.start()
        self._after_fault()

    def _after_fault(self) -> None:
        """The run goes on; now and then it is killed while it connects again."""
        if self.luck.random() < 0.3:
            pause(self.luck.uniform(0, 0.6))
            self._kill_now(how="as it connects again")
        if self.luck.random() < 0.3:
            self._progress()

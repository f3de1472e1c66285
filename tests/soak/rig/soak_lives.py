"""The lives of the soaked run: started again whenever it ends, as systemd would; judged by its exit codes."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from killed_runs import STARTS
from running import event_in, limit_descriptors
from soak_servers import Servers

HERE = Path(__file__).parent
AGAIN_S = 0.3
"""The wait before another start, RestartSec of systemd."""
END_LIMIT_S = 120
"""A run that is told to end, or that was taken over, has ended by then."""
FINISH_LIMIT_S = 1200
"""After all faults, the last life that is started has begun by then, and comes to the end of the input."""
NO_ROOM = b"No space left on device"
"""ENOSPC, as Python, Rust and RocksDB say it."""
LEFT_ALONE = {
    4: "a server did not answer", 7: "the outcome of a write is unknown", 8: "a broker's error without a rule",
    9: "ended without a last checkpoint",
}  # fmt: skip
"""Exit codes after which docs/operations.md says to run again; docs/tasks/deploy.md leaves 2, 3 and 6 to a person."""
FENCED = 5
OF_THE_RUN = ("coordinator-", "store-")
"""Steps that begin so are of the run's own process, others of a worker's."""
SETTINGS = (
    "--checkpoint-interval", "1s", "--checkpoint-timeout", "20s", "--deploy-timeout", "60s", "--store-timeout", "2m",
    "--restart", "exponential_delay:max=3s", "--broker-timeout", "20s", "--max-late", "1",
)  # fmt: skip
STEPS = (
    "worker-barrier", "worker-aligned", "unaligned-overtaken", "unaligned-captured", "worker-frozen", "worker-blocks",
    "worker-flushed", "timed-firing", "timed-fired", "worker-acknowledged", "worker-finalized", "coordinator-triggered",
    "coordinator-checked", "coordinator-decided", "coordinator-committed", "coordinator-finalized", "store-committing",
    "store-committed",
)  # fmt: skip


class Life:
    def __init__(self, command: list[str], env: dict[str, str], log: Path, fired: Path, action: str) -> None:
        """*fired*: the folder of its failpoints, one of which is armed with *action*."""
        fired.mkdir()
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, cwd=HERE, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        limit_descriptors(self.process.pid)
        self.fired, self.action, self._log = fired, action, log
        self._position = 0
        self.workers: list[int] = []
        self.is_running = self.is_told_to_end = self.is_struck = False
        self.checkpoints = self.refusals = 0
        """How often its log has a checkpoint, and says that a disk is full."""
        self.skew_s = 0.0
        """Its clock, less ours, at its last event."""

    def read(self) -> None:
        """Read what its log has got."""
        with self._log.open("rb") as log:
            log.seek(self._position)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        self.refusals += whole.count(NO_ROOM)
        for event in filter(None, map(event_in, whole.splitlines())):
            self.skew_s = event["at_ms"] / 1000 - time.time()
            self.is_running = self.is_running or event["event"] == "running"
            self.checkpoints += event["event"] == "checkpoint"
            if event.get("step") == "deployed":
                self.workers = event["workers"]

    @property
    def has_killed_itself(self) -> bool:
        """By SIGKILL, at a step."""
        return self.action == "kill" and any(step.name.startswith(OF_THE_RUN) for step in self.fired.iterdir())

    def tail(self) -> str:
        return self._log.read_bytes()[-3_000:].decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """To all its processes. Each worker has a group of its own."""
        for pid in (self.process.pid, *self.workers):
            with suppress(ProcessLookupError):
                os.killpg(pid, number)


class Lives:
    def __init__(
        self, servers: Servers, name: str, folder: Path, luck: random.Random, note: Callable[[str, str], None],
        find: Callable[[str, str, str], None],
    ) -> None:  # fmt: skip
        """*note* takes a fault, *find* a finding."""
        self._servers, self._name, self._folder, self._luck = servers, name, folder, luck
        self._note, self._find = note, find
        self._current: Life | None = None
        self._zombies: list[tuple[Life, float]] = []
        self._start_at_s = 0.0
        self._is_over = False
        self._deferred: list[tuple[float, Callable[[], object]]] = []
        self._clock = folder / "clock"
        self._clock.write_text("0")
        self.count = 0
        self.checkpoints = self._refusals = 0
        """Of the lives that are over."""
        self.codes: Counter[int] = Counter()
        self.meanwhile: Callable[[], object] = lambda: None
        """Is called in all waits."""

    # --- waits ------------------------------------------------------------------------------------------------------

    def pause(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for so long, or until that holds; start the run again meanwhile."""
        deadline = time.monotonic() + seconds
        while not until() and time.monotonic() < deadline:
            self._tend()
            time.sleep(0.05)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._deferred.append((time.monotonic() + seconds, action))

    def _tend(self) -> None:
        now = time.monotonic()
        due = [each for each in self._deferred if each[0] <= now]
        self._deferred = [each for each in self._deferred if each[0] > now]
        for _, action in due:
            action()
        for zombie, deadline_s in list(self._zombies):
            self._judge_zombie(zombie, deadline_s)
        if self._current is None:
            if now >= self._start_at_s and not self._is_over:
                self._current = self._start()
        else:
            self._look(self._current)
        self.meanwhile()

    def _look(self, life: Life) -> None:
        life.read()
        if not life.is_struck and (step := next(life.fired.iterdir(), None)) is not None:
            life.is_struck = True
            self._note("step", f"{life.action} at {step.name}")
            if life.action == "stop":
                self.later(self._luck.uniform(0.3, 12), lambda: life.signal(signal.SIGCONT))
        if life.process.poll() is not None:
            self._ended(life)

    # --- the run ----------------------------------------------------------------------------------------------------

    def _start(self, *arguments: str) -> Life:
        luck, self.count = self._luck, self.count + 1
        fired = self._folder / f"fired-{self.count}"
        action = ""
        env = {
            **os.environ, "SOAK_DSN": self._servers.postgres.dsn(), "EXACTLYONCE_FAILPOINTS_FIRED": str(fired),
            "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(HERE),
        }  # fmt: skip
        if self._servers.movable_clock is not None:
            env |= {"LD_PRELOAD": str(self._servers.movable_clock), "MOVED_CLOCK": str(self._clock)}
        if luck.random() < 0.6 and not arguments:
            is_start = luck.random() < 0.15
            step, nth = (luck.choice(STARTS), 1) if is_start else (luck.choice(STEPS), luck.randrange(1, 12))
            action = luck.choice(("kill", "kill", "stop"))
            env["EXACTLYONCE_FAILPOINTS"] = f"{step}={action}@{nth}"
        command = [
            *(sys.executable, "-m", "exactlyonce.cli.main", "run", "soaked_pipeline:soaked", "--verbose"),
            *("--bootstrap-servers", self._servers.proxy.bootstrap_servers),
            *("--param", f"name={self._name}", "--param", f"lake={self._servers.lake}"),
            *(*SETTINGS, "--parallelism", luck.choice("12223")),
            *(("--unaligned",) if luck.random() < 0.4 else ()),
            *(("--state-backend", "rocksdb", "--state-folder", str(self._servers.lake.with_name("state")))
              if luck.random() < 0.25 else ()),
            *arguments,
        ]  # fmt: skip
        return Life(command, env, self._folder / f"life-{self.count:04}.log", fired, action)

    def _ended(self, life: Life, *, is_killed: bool = False) -> None:
        """Judge the end of the current life, and have another start. *is_killed*: we have sent SIGKILL."""
        code = life.process.wait()
        life.read()
        self._close(life)
        self.codes[code] += 1
        is_killed = code == -signal.SIGKILL and (is_killed or life.has_killed_itself)
        if not (is_killed or code in LEFT_ALONE or (code == 0 and life.is_told_to_end)):
            self._find("ended", "the run", f"life {self.count} ended with code {code}: {life.tail()}")
        self._current = None
        self._start_at_s = time.monotonic() + AGAIN_S

    def _close(self, life: Life) -> None:
        life.signal(signal.SIGKILL)
        self.checkpoints += life.checkpoints
        self._refusals += life.refusals

    @property
    def refusals(self) -> int:
        """How often runs have said that a disk is full."""
        lives = (self._current, *(zombie for zombie, _ in self._zombies))
        return self._refusals + sum(life.refusals for life in lives if life is not None)

    @property
    def pid(self) -> int | None:
        """The leader's process."""
        return None if self._current is None else self._current.process.pid

    def workers(self) -> list[int]:
        life = self._current
        return [] if life is None else [pid for pid in life.workers if Path(f"/proc/{pid}").exists()]

    def kill(self) -> bool:
        if (life := self._current) is None or life.process.poll() is not None:
            return False
        life.process.kill()
        life.process.wait()
        self._ended(life, is_killed=True)
        return True

    def end(self) -> bool:
        """SIGTERM to it; returns once it has ended."""
        if (life := self._current) is None or life.process.poll() is not None:
            return False
        life.is_told_to_end = True
        life.process.terminate()
        self.pause(END_LIMIT_S, until=lambda: self._current is not life)
        if self._current is life:
            self._find("stalled", "the run", f"life {self.count} did not end on SIGTERM: {life.tail()}")
            self.kill()
        return True

    def take_over(self) -> bool:
        """Stop the leader, have another run take over, and wake the old one up: it has to end. False: no other run
        has come up."""
        if (life := self._current) is None or not life.is_running or life.process.poll() is not None:
            return False
        life.process.send_signal(signal.SIGSTOP)
        self._current = other = self._start()
        self.pause(30, until=lambda: other.is_running or self._current is not other)
        life.process.send_signal(signal.SIGCONT)
        self._zombies.append((life, time.monotonic() + END_LIMIT_S))
        return other.is_running

    def _judge_zombie(self, zombie: Life, deadline_s: float) -> None:
        code = zombie.process.poll()
        if code is None and time.monotonic() < deadline_s:
            return
        zombie.read()
        if code is None:
            self._find("stalled", "a run that was taken over", f"it goes on: {zombie.tail()}")
        elif code not in (FENCED, *LEFT_ALONE) and not (code == -signal.SIGKILL and zombie.has_killed_itself):
            self._find("ended", "a run that was taken over", f"it ended with {code}: {zombie.tail()}")
        if code is not None:
            self.codes[code] += 1
        self._close(zombie)
        zombie.process.wait()
        self._zombies = [each for each in self._zombies if each[0] is not zombie]

    def finish(self) -> None:
        """Have it read to the newest record, and end; a life that may be started again is."""
        self.end()
        self._is_over = True
        deadline = time.monotonic() + FINISH_LIMIT_S
        while True:
            life = self._current = self._start("--until", "latest")
            life.is_told_to_end = True
            self.pause(3 * END_LIMIT_S, until=lambda: self._current is None)
            if self._current is not None:
                self._find("stalled", "the run", f"it does not come to the end: {life.tail()}")
                self.kill()
            code = life.process.returncode
            if code not in LEFT_ALONE:
                return
            if time.monotonic() > deadline:
                self._find("stalled", "the run", f"its lives end with {code} after all faults, too: {life.tail()}")
                return

    # --- the clock --------------------------------------------------------------------------------------------------

    def move_clock(self, offset_s: float) -> bool:
        """Whether the run's clock was seen to have moved."""
        self._clock.write_text(str(round(offset_s * 1000)))
        self.pause(5, until=lambda: self._is_at(offset_s))
        return self._is_at(offset_s)

    def _is_at(self, offset_s: float) -> bool:
        return self._current is not None and abs(self._current.skew_s - offset_s) < max(1, abs(offset_s) / 10)

    def close(self) -> None:
        for life in (self._current, *(zombie for zombie, _ in self._zombies)):
            if life is not None:
                self._close(life)
                life.process.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

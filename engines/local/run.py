"""Running a pipeline on this machine: incarnation after incarnation, until one ends cleanly or needs a person.

An incarnation ends without a person's fault when the broker is away or an outcome is unknown; the next one fences it
and reads what is true. Everything else that ends one ends the run. All share one restart strategy and one clock, so
that a checkpoint that any of them completes counts as progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.succession import LOOK_PAUSE_MS, AnotherLeads, Succession
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower
from exactlyonce.engines.local.host import LocalHost
from exactlyonce.engines.local.job import Job
from exactlyonce.engines.local.reporting import EventReporter, JsonReporter, Report, Reporter
from exactlyonce.engines.local.workers import InlineWorker, WorkerProcesses, refuse_too_many
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.plan import plan
from exactlyonce.engines.processes import is_known_dead
from exactlyonce.engines.stop_signals import handling_stop_signals
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, EndedEarly, Undetermined
from exactlyonce.pipeline.loading import Loaded

PAUSE_S = 0.1
"""How soon a run that waits for another one sees that its turn has come."""


class Stopper:
    """Whether the user asked for an end, once or again, and whom to tell.

    *answer* is called for every request, with whether it was made before: a last checkpoint may take a while.
    """

    def __init__(self, answer: Callable[[bool], None] = lambda again: None) -> None:
        self._answer = answer
        self.asked = threading.Event()
        self.asked_again = False
        self._job: Job | None = None

    def attach(self, job: Job) -> None:
        """*job* is the incarnation to be stopped from now on."""
        self._job = job
        if self.asked.is_set():
            job.stop()

    def stop(self, *_: Any) -> None:
        """The first time cleanly, after that at once. Signal handler, too."""
        again = self.asked.is_set()
        if again:
            self.asked_again = True
            if self._job is not None:
                self._job.end_at_once()
        else:
            self.asked.set()
            if self._job is not None:
                self._job.stop()
        self._answer(again)


def _handler(stopper: Stopper, *, inline: bool) -> Callable[..., None]:
    """What a signal does: the run stops cleanly; again, at once.

    *inline*: the user's code runs on this thread, and may not return: only an exception gets it out.
    """

    def stop(*_: Any) -> None:
        stopper.stop()
        if inline and stopper.asked_again:
            raise KeyboardInterrupt

    return stop


def run_loaded(
    loaded: Loaded, options: RunOptions, reporter: Reporter, stopper: Stopper | None = None
) -> Manifest | None:
    """Run until the end; returns the last manifest of a clean end, raises what ended it otherwise."""
    stopper = stopper or Stopper()
    options.client.check()
    options.state.check()
    graph = loaded.pipeline.build()
    physical = plan(graph, options.parallelism)
    refuse_too_many(physical)
    restart, recovered = options.restart_strategy(), False
    succession = Succession(standby=options.standby, clock=SystemClock())
    with handling_stop_signals(_handler(stopper, inline=options.inline)):
        while True:
            workers = InlineWorker() if options.inline else WorkerProcesses()
            report = Report(graph.pipeline_id, reporter, options.client.redact)
            host = LocalHost(physical, loaded.reference, options, workers, report, succession)
            job = Job(physical, options, restart, host, report)
            stopper.attach(job)
            live = partial(host.run, job)
            try:
                return workers.work_for(live) if isinstance(workers, InlineWorker) else live()
            except AnotherLeads:
                if not _has_turn(job, succession, stopper):
                    _stopped_waiting(job)
                    return None
            except (BrokerUnavailable, Undetermined) as error:
                recovered = recovered or job.recovered
                delay_ms = restart.failed(SystemClock().monotonic_ms())
                if not recovered or delay_ms is None or options.inline:
                    raise
                job.report.note(f"{error} A new incarnation begins in {delay_ms} ms.")
                if stopper.asked.wait(delay_ms / 1000):
                    raise


def _has_turn(job: Job, succession: Succession, stopper: Stopper) -> bool:
    """Wait for another run that leads; True once *succession* lets this one begin, False as soon as it is stopped.

    It only looks at the decision log, and neither fences nor writes. The looks have a thread of their own, which is
    left behind where one hangs.
    """
    ended, turn = threading.Event(), Future[None]()

    def watch() -> None:
        try:
            _watch_leading(job, succession, ended)
            turn.set_result(None)
        except BaseException as error:
            turn.set_exception(error)

    threading.Thread(target=watch, name="standby", daemon=True).start()
    try:
        while not stopper.asked.wait(PAUSE_S):
            if turn.done():
                turn.result()
                if succession.reason:
                    pipeline = job.plan.graph.pipeline_id
                    job.report.note(f"the other run of {pipeline} {succession.reason}: this one takes over")
                return True
        return False
    finally:
        ended.set()


def _watch_leading(job: Job, succession: Succession, ended: threading.Event) -> None:
    """Return once nobody is waited for. Each incarnation that is waited for is told once, and so is an outage."""
    follower = LogFollower(job.options.client.confluent(), job.plan.graph.pipeline_id)
    told, is_away = 0, False
    while not ended.is_set():
        try:
            awaited = succession.awaited(follower.look(), is_known_dead)
        except BrokerUnavailable as error:
            if not is_away:
                waits = "This run looks again until one answers: it waits for another one that leads."
                job.report.note(f"{error} {waits}")
            is_away = True
        else:
            is_away = False
            if awaited is None:
                return
            if awaited.incarnation.incarnation != told:
                told = awaited.incarnation.incarnation
                job.report.awaits(awaited)
        ended.wait(LOOK_PAUSE_MS / 1000)


def _stopped_waiting(job: Job) -> None:
    """A clean end, since nothing of this run has begun."""
    job.report.ended(None)
    if job.options.until == "latest":
        raise EndedEarly(
            "Ended, as asked for, while another run led: this one has read nothing. Nothing is open or lost: run it "
            "again."
        )


def run(
    loaded: Loaded,
    *,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
    log_level: str = "info",
    **options: Any,
) -> Manifest | None:
    """What `Pipeline.run` calls: *options* are those of `exactlyonce run`, with underscores.

    *on_event* is called with each event of *log_level* or graver, by one thread; without it each is a line of JSON on
    stderr.
    """
    from exactlyonce.engines.configuration import options_from

    if on_event is not None and not callable(on_event):
        raise ConfigError(f"on_event is {on_event!r}: give a function that takes an event, a dict.")
    reporter = JsonReporter(level=log_level) if on_event is None else EventReporter(on_event, level=log_level)
    return run_loaded(loaded, options_from(options), reporter)

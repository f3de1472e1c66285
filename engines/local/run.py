"""Runs a pipeline on this machine: incarnation after incarnation, until one ends cleanly or needs a person.

If the broker or a schema registry is away, or has other settings than at the start, or an outcome is unknown, the next
incarnation fences the last one and reads what is true. Any other end of an incarnation ends the run. All share one
restart strategy and one clock, so that any completed checkpoint counts as progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.succession import LOOK_PAUSE_MS, AnotherLeads, Succession
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower
from exactlyonce.connectors.kafka.client import can_reach
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines import events
from exactlyonce.engines.local.host import LocalHost
from exactlyonce.engines.local.job import Job
from exactlyonce.engines.local.monitoring.serving import STANDBY, WAITING, Health, Metrics, Paths
from exactlyonce.engines.local.reporting import EventReporter, Report, Reporter, reporter_for
from exactlyonce.engines.local.workers import InlineWorker, WorkerProcesses, refuse_too_many
from exactlyonce.engines.options import RunOptions, listening_at
from exactlyonce.engines.plan import Plan, plan
from exactlyonce.engines.processes import is_known_dead, is_supervised
from exactlyonce.engines.stop_signals import handling_stop_signals
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.durations import written_duration
from exactlyonce.pipeline.errors import (
    BEFORE_ANYTHING_RAN,
    BrokerUnavailable,
    ConfigError,
    EndedEarly,
    ExactlyOnceError,
    Fenced,
    Outdated,
    StoppedShort,
    StorageUnavailable,
    StoreUnavailable,
    Unavailable,
    Undetermined,
)
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.pipeline.names import setting
from exactlyonce.pipeline.running import LocalSettings, RunResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

START_PAUSE_MS = 1_000
"""Before a start tries again."""
REACH_INTERVAL_MS = 1_000
"""The interval in which a run that waits for brokers tries to reach one."""
PAUSE_S = 0.1
"""The interval in which a waiting run looks for its turn."""


class Stopper:
    """The user's requests to stop, passed on to the present incarnation.

    *answer* is called for each request, with whether it is a repeated one: a last checkpoint may take a while.
    """

    def __init__(self, answer: Callable[[bool], None] = lambda again: None) -> None:
        self._answer = answer
        self.asked = threading.Event()
        self.asked_again = False
        self._job: Job | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there was an incarnation to stop."""
        return self._job is not None

    def attach(self, job: Job) -> None:
        self._job = job
        if self.asked.is_set():
            job.stop()

    def stop(self, *_: Any) -> None:
        """Stop cleanly; the second time, at once. Also a signal handler."""
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


def run_loaded(
    loaded: Loaded, options: RunOptions, reporter: Reporter, stopper: Stopper | None = None
) -> Manifest | None:
    """Run until the end. Returns the last manifest of a clean end; raises the error of any other."""
    stopper = stopper or Stopper()

    def stop(*_: Any) -> None:
        stopper.stop()
        if options.inline and stopper.asked_again:  # only an exception gets this thread out of the user's code
            raise KeyboardInterrupt

    options.client.check()
    options.state.check()
    graph = loaded.pipeline.build()
    physical = plan(graph, options.parallelism)
    refuse_too_many(physical)
    refuse_event_time(graph)
    restart, recovered, starting = options.restart_strategy(), False, _Starting(options)
    succession = Succession(standby=options.standby, clock=SystemClock())
    with handling_stop_signals(stop), _monitored(physical, options, reporter) as reporters:
        while True:
            workers = InlineWorker() if options.inline else WorkerProcesses()
            report = Report(graph.pipeline_id, reporters, options.client.redact, graph.dead_letter_limits, graph)
            host = LocalHost(physical, loaded.reference, options, workers, report, succession)
            job = Job(physical, options, restart, host, report)
            stopper.attach(job)
            live = partial(host.run, job)
            try:
                return workers.work_for(live) if isinstance(workers, InlineWorker) else live()
            except (AnotherLeads, Fenced) as error:
                if isinstance(error, Fenced):
                    if not options.standby:
                        raise
                    job.report.note(f"{error} This run stands by.")
                if not _has_turn(job, succession, stopper):
                    report.ended(None)  # cleanly: nothing of this run has begun
                    if options.until == "running":
                        return None
                    raise EndedEarly(
                        "Ended, as asked for, while another run led: this one has read nothing. Nothing is open or "
                        "lost: run it again."
                    ) from None
                starting = _Starting(options)
            except (BrokerUnavailable, StoreUnavailable, Unavailable, Undetermined, Outdated) as error:
                if options.inline:
                    raise
                recovered = recovered or job.recovered
                if not recovered:
                    starting.require_time(error, job.report)
                    pause_ms = START_PAUSE_MS
                elif isinstance(error, StoreUnavailable):  # it was waited for
                    raise
                else:
                    delay_ms = restart.failed(SystemClock().monotonic_ms())
                    if delay_ms is None:
                        raise
                    job.report.restarting(str(error), f"{error} A new incarnation begins in {delay_ms} ms.")
                    pause_ms = delay_ms
                job.report.turned(WAITING, rests_s=pause_ms / 1000)
                if _is_stopped_within(pause_ms, error, options.client, stopper):
                    if recovered:
                        raise
                    raise StoppedShort(BEFORE_ANYTHING_RAN) from None


class _Starting:
    """The wait of a start, or of a takeover, for brokers, stores and registries, until an incarnation has recovered."""

    def __init__(self, options: RunOptions) -> None:
        self._timeout_ms = options.start_timeout_ms(is_supervised=is_supervised())
        self._end_ms = SystemClock().monotonic_ms() + self._timeout_ms
        self._has_noted = False

    def require_time(self, error: ExactlyOnceError, report: Report) -> None:
        """Raise *error*, for which an incarnation could not begin, if another one would come too late."""
        if SystemClock().monotonic_ms() + START_PAUSE_MS >= self._end_ms:
            if isinstance(error, StoreUnavailable):
                raise StoreUnavailable(f"{error.what} Nothing is lost: run it again once it is there.") from error
            raise error
        if not self._has_noted:
            self._has_noted = True
            limit = f"{written_duration(self._timeout_ms)} from its start, by {setting('broker_timeout')}"
            report.note(f"{error} This run looks again until one answers, for {limit}.")


def _is_stopped_within(pause_ms: int, error: ExactlyOnceError, client: ClientConfig, stopper: Stopper) -> bool:
    """Pause; True as soon as the run is stopped. If no broker answered, and one can be reached again, it ends early."""
    clock, was_away = SystemClock(), False
    end_ms = clock.monotonic_ms() + pause_ms
    while (left_ms := end_ms - clock.monotonic_ms()) > 0:
        if stopper.asked.wait(min(left_ms, REACH_INTERVAL_MS) / 1000):
            return True
        if isinstance(error, BrokerUnavailable) and not isinstance(error, StorageUnavailable):
            is_away = not can_reach(client)
            if was_away and not is_away:
                return False
            was_away = was_away or is_away
    return stopper.asked.is_set()


def refuse_event_time(graph: LogicalGraph) -> None:
    """Raise ConfigError for state by time in a graph with loops."""
    if graph.timed and graph.loops:
        raise ConfigError(
            f"Operator {graph.timed[0].id!r} keeps state by time, which does not go with loops yet: write the records "
            f"that it takes, or those that go into loop {graph.loops[0].id!r}, to a topic, and read it in another "
            f"pipeline."
        )


@contextmanager
def _monitored(physical: Plan, options: RunOptions, reporter: Reporter) -> Iterator[Sequence[Reporter]]:
    """*reporter*, and those whose figures are served at, or sent to, the addresses of *options* meanwhile."""
    health = Health(options.checkpoint)
    probes: Paths = {"/live": health.answer_live, "/ready": health.answer_ready}
    reporters: list[Reporter] = [reporter, health]
    served: dict[str, Paths] = {}
    stack = ExitStack()
    if options.metrics:
        metrics = Metrics(physical.graph.pipeline_id)
        reporters.append(metrics)
        served[options.metrics] = {"/metrics": metrics.answer, **probes}
    if options.ui:
        from exactlyonce.engines.local.monitoring.page import Page, WaitingNow

        waiting = WaitingNow(options.client, physical.graph.pipeline_id, SystemClock())
        stack.callback(waiting.close)
        page = Page(physical, health, SystemClock(), waiting.figures)
        reporters.append(page)
        served[options.ui] = {**page.paths, **probes, **served.get(options.ui, {})}
    with stack:
        if options.serve:
            from exactlyonce.engines.local.monitoring.state_service import StateService, token_for
            from exactlyonce.engines.savepoints.state_reader import MEMORY_BYTES, StateReader

            token = token_for(options.serve, options.serve_token, "--serve-token")
            reader = StateReader.of(options.client, physical.graph.pipeline_id, MEMORY_BYTES)
            paths = stack.enter_context(StateService(stack.enter_context(reader), token).following())
            served[options.serve] = {**served.get(options.serve, {}), **paths}
        if options.traces:
            from exactlyonce.engines.local.monitoring.spans import exporting

            reporters.append(stack.enter_context(exporting(physical.graph.pipeline_id, options.traces)))
        for address, paths in served.items():
            from exactlyonce.engines.local.monitoring.server import serving

            stack.enter_context(serving(*listening_at(address), paths, keep_alive=address == options.serve))
            shown = ", ".join(sorted(path for path in paths if not path.endswith(".json")))
            reporter.event(events.event("listening", physical.graph.pipeline_id, text=f"http://{address} has {shown}"))
        yield reporters


def _has_turn(job: Job, succession: Succession, stopper: Stopper) -> bool:
    """Wait while another run leads. True once *succession* lets this one begin, False as soon as it is stopped.

    It only looks at the decision log, and neither fences nor writes. A thread does the looks; a hanging one is left.
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
            job.report.turned(STANDBY)
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
    """Return once no other run is waited for. Reports each other incarnation once, its failure, and an outage once."""
    with closing(LogFollower(job.options.client, job.plan.graph.pipeline_id)) as follower:
        reported, is_away = (0, 0), False
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
                known = awaited.incarnation.incarnation, awaited.incarnation.exit_code
                if known != reported:
                    reported = known
                    job.report.awaits(awaited)
            ended.wait(LOOK_PAUSE_MS / 1000)


def run(loaded: Loaded, **settings: Unpack[LocalSettings]) -> RunResult | None:
    """Implements `exactlyonce.run` for the engine "local".

    One thread calls *on_event* with each event of *log_level* or graver. Without it, each is a line on stderr.
    """
    from exactlyonce.engines.configuration import options_from

    on_event, log_level = settings.pop("on_event", None), settings.pop("log_level", "info")
    if on_event is not None and not callable(on_event):
        raise ConfigError(f"on_event is {on_event!r}: give a function that takes an event, a dict.")
    checked = options_from(settings)
    if on_event is None:
        reporter = reporter_for(checked.log_format, log_level)
    else:
        reporter = EventReporter(on_event, level=log_level)
    manifest = run_loaded(loaded, checked, reporter)
    if manifest is None:
        return None
    return RunResult(manifest.pipeline, manifest.checkpoint, manifest.offsets_by_source)

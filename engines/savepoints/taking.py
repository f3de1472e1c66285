"""A savepoint taken on request: the run takes it, and it stays in the topic or is exported.

Invariants: a place that takes no export is an error before the run is asked. An export is shown once it is whole, and
only then is the run asked to delete the savepoint in the topic; one that others have asked for, too, stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.records.storage_url import storage_url
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines import run_requests
from exactlyonce.engines.configuration import absolute
from exactlyonce.engines.run_requests import Note
from exactlyonce.engines.savepoints.exported import export, require_place
from exactlyonce.engines.savepoints.retained import open_savepoint, require_finalized, unless_expired
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError
from exactlyonce.pipeline.names import setting


@dataclass(frozen=True)
class TakenSavepoint:
    """A savepoint that a run has taken; or the newest checkpoint of a pipeline that does not run, exported."""

    manifest: Manifest = field(repr=False)
    url: str
    """The URL of its new folder; empty: it was not exported."""
    by_run: bool
    """Whether a run has taken it."""
    stopped: bool
    """Whether the run has ended after it, as it was asked to."""

    @property
    def pipeline(self) -> str:
        """The name of the pipeline."""
        return self.manifest.pipeline

    @property
    def checkpoint(self) -> int:
        """Its number."""
        return self.manifest.checkpoint

    @property
    def offsets(self) -> dict[str, dict[int, int]]:
        """The offset at which the next work begins, by source and partition."""
        return self.manifest.offsets_by_source

    @property
    def from_savepoint(self) -> str | int:
        """The value of the option `from_savepoint`, by which a run begins from it."""
        return self.url or self.checkpoint

    @property
    def is_shared(self) -> bool:
        """Whether another request, at the same time, got the same savepoint."""
        return len(self.manifest.requests) > 1

    @property
    def is_kept(self) -> bool:
        """Whether it stays in the checkpoint topic until it is deleted there."""
        return self.by_run and (self.stopped or not self.url or self.is_shared)

    @property
    def kept_until(self) -> str:
        """The end of a sentence about a savepoint in the topic."""
        return f"is kept until `exactlyonce savepoints delete {self.pipeline} {self.checkpoint}`."


def take(
    config: ClientConfig, pipeline: str, *, to: str | None, stop: bool, timeout_ms: int, note: Note,
    shown: Callable[[TakenSavepoint], object] = lambda taken: None,
) -> TakenSavepoint:  # fmt: skip
    """Have the run of *pipeline* take a savepoint and, with *stop*, end; export it below *to*, a URL, if one is given.

    *shown* gets the result as soon as it is whole. Raises `ConfigError` if there is no run, unless *to* names a place
    for its newest checkpoint, and `NotAnswered` if the run does not do it within *timeout_ms*.
    """
    if to is not None:
        to = absolute(to)
        require_place(storage_url(to, setting("to")))
    history = read_history(config, pipeline)
    living = run_requests.living_run(history)
    if living is not None:
        manifest = run_requests.savepoint(config, pipeline, living, timeout_ms, stop=stop, note=note)
    else:
        manifest = _newest(history, exported=to is not None, stop=stop)
    taken = TakenSavepoint(manifest, "", by_run=living is not None, stopped=stop)
    if to is not None:
        taken = _exported(config, taken, to, note)
    shown(taken)
    if taken.by_run and not taken.is_kept:
        _let_go(config, taken, timeout_ms, note)
    return taken


def _newest(history: History, *, exported: bool, stop: bool) -> Manifest:
    """The checkpoint to export if the pipeline does not run."""
    if not exported or stop or history.latest is None:
        latest = history.latest.checkpoint if history.latest else 0
        raise ConfigError(
            f"{history.pipeline} does not run, so it cannot take a savepoint. Nothing is lost without one: the next "
            f"run goes on from checkpoint {latest}. To take one, run the pipeline and ask again; or export that "
            f"checkpoint: --to URL, without --stop."
        )
    require_finalized(history)
    return history.latest


def _exported(config: ClientConfig, taken: TakenSavepoint, to: str, note: Note) -> TakenSavepoint:
    """The same, with the URL of its new folder."""
    try:
        with unless_expired(config, taken.manifest), open_savepoint(config, taken.manifest) as contents:
            url = export(contents, to)
    except (ExactlyOnceError, KeyboardInterrupt):
        if taken.by_run:
            note(f"Savepoint {taken.checkpoint} was taken, but could not be exported. It {taken.kept_until}")
        raise
    return TakenSavepoint(taken.manifest, url, by_run=taken.by_run, stopped=taken.stopped)


def _let_go(config: ClientConfig, taken: TakenSavepoint, timeout_ms: int, note: Note) -> None:
    """Have the run delete the exported savepoint in the topic."""
    try:
        run_requests.delete(config, taken.pipeline, taken.checkpoint, timeout_ms, note)
    except (ExactlyOnceError, KeyboardInterrupt):
        note(
            f"Savepoint {taken.checkpoint} was exported to {taken.url}, which is complete. If the run has got the "
            f"request, the topic drops it with the next checkpoint; else it {taken.kept_until}"
        )
        raise

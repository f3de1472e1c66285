"""Requests to a running coordinator, from any machine: through the pipeline's mailbox, answered by its decision log.

Invariants: only the decision log answers. A request is for the living incarnation, so that no later run carries it out,
and is removed with its sender. A sender that stops waiting hears what the run may still do, for the run may have seen
the request. A sender that waits for longer than `QUIET_MS` hears for which process. Two requests to stop a run with a
savepoint get the same savepoint; two requests to cancel a run both succeed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Event
from typing import TypeVar

import msgspec

from exactlyonce.checkpoint.records.history import SILENCE_MS, History
from exactlyonce.checkpoint.records.manifest import Incarnation, Manifest, TopicInfo
from exactlyonce.connectors.kafka import group_offsets
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.mailbox import CANCEL, DELETE, SAVEPOINT, Asked, Mailbox
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines import processes
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, TopicError

POLL_S = 0.5
QUIET_MS = 2_000
"""The time that a sender waits without a note."""
TURN_MS = 5_000
"""The time that another sender's request stays: the run looks every second, so it has seen it by then."""
T = TypeVar("T")
Answer = Callable[[History], T | None]
Note = Callable[[str], None]
"""Shows a note to a person."""


class NotAnswered(ExactlyOnceError):
    """A run did not do what it was asked for. It has changed nothing, or may still do it."""


def savepoint(
    config: ClientConfig, pipeline: str, living: Incarnation, timeout_ms: int, *, stop: bool, note: Note
) -> Manifest:
    """Have the run of *pipeline*, seen as *living*, take a savepoint. Returns its manifest once it is finalized and,
    with *stop*, the run has ended."""
    asked = Asked(id=secrets.token_hex(8), incarnation=0, action=SAVEPOINT, stop=stop)

    def answer(history: History) -> Manifest | None:
        serving = (manifest for manifest in history.retained if asked.id in manifest.requests)
        taken = [manifest for manifest in serving if manifest.checkpoint in history.finalized]
        if taken and (not stop or _has_ended(history, taken[-1].incarnation)):
            return taken[-1]
        return ended_behind(history, living.incarnation) if stop else None

    return _answered(config, pipeline, asked, answer, timeout_ms, note)


def delete(config: ClientConfig, pipeline: str, checkpoint: int, timeout_ms: int, note: Note) -> None:
    """Have the run of *pipeline* delete a savepoint."""
    asked = Asked(id=secrets.token_hex(8), incarnation=0, action=DELETE, checkpoint=checkpoint)

    def answer(history: History) -> bool | None:
        return (history.incarnation_latest > 0 and checkpoint not in history.manifests) or None

    _answered(config, pipeline, asked, answer, timeout_ms, note)


def cancel(
    config: ClientConfig,
    topic: TopicInfo,
    history: History,
    living: Incarnation,
    timeout_ms: int,
    note: Note,
) -> History:
    """Cancel the run seen as *living* in *history* of *topic*. Returns the log that says so, whoever asked for it.

    If another topic has its name by now, *topic* was deleted: the log is empty. The other topic is a later run's.
    """
    asked = Asked(id=secrets.token_hex(8), incarnation=0, action=CANCEL)

    def answer(now: History) -> History | None:  # *now* was read before the look at the topic
        if _made_anew(config, topic, history.pipeline):
            return History(history.pipeline)
        return now if cancelled_since(now, living.incarnation) else None

    return _answered(config, history.pipeline, asked, answer, timeout_ms, note)


def _made_anew(config: ClientConfig, topic: TopicInfo, pipeline: str) -> bool:
    """Whether another topic has the name of *topic*; False while there is none."""
    with suppress(TopicError):
        return find_topic(config, pipeline).topic_id != topic.topic_id
    return False


def cancelled_since(history: History, since: int) -> bool:
    """Whether incarnation *since* or a later one was cancelled. Incarnations that began after that are not meant."""
    return any(other.cancelled for other in history.incarnations.values() if other.incarnation >= since)


def living_run(history: History) -> Incarnation | None:
    """The incarnation that seems alive; see `History.living`."""
    return history.living(SystemClock().now_ms())


def ended_behind(history: History, since: int) -> Manifest | None:
    """The savepoint with which incarnation *since*, or a later one, has ended cleanly, whoever asked for it.

    It holds all that the run has read, and nothing was decided after it.
    """
    newest = history.latest
    if newest is None or not newest.is_savepoint or newest.checkpoint != history.checkpoint_latest:
        return None
    ended = history.incarnations.get(newest.incarnation)
    if ended is None or ended.incarnation < since or not ended.ended or ended.cancelled or ended.exit_code:
        return None
    return newest if newest.checkpoint in history.finalized else None


def _has_ended(history: History, incarnation: int) -> bool:
    """Whether *incarnation*, or one that took over from it, has ended. A run begun since is not meant."""
    since = (other for other in history.incarnations.values() if other.incarnation >= incarnation)
    return living_run(history) is None or any(other.ended for other in since)


def _answered(config: ClientConfig, pipeline: str, asked: Asked, answer: Answer[T], timeout_ms: int, note: Note) -> T:
    try:
        return _waited_for(config, pipeline, asked, answer, timeout_ms, note)
    except (KeyboardInterrupt, ExactlyOnceError) as error:
        if not isinstance(error, NotAnswered | ConfigError):  # they say so themselves, or nobody could be asked
            note(_may_still(pipeline, asked))
        raise


def _waited_for(config: ClientConfig, pipeline: str, asked: Asked, answer: Answer[T], timeout_ms: int, note: Note) -> T:
    clock = SystemClock()
    begun_ms = clock.monotonic_ms()
    deadline_ms = begun_ms + timeout_ms
    others: dict[str, int] = {}
    noted: tuple[int, str] | None = None
    with closing(Mailbox(config.confluent(), pipeline)) as mailbox:
        try:
            while True:
                history = _log(config, pipeline)
                if (result := answer(history)) is not None:
                    return result
                living, newest = living_run(history), history.newest_incarnation
                gone = newest is None or newest.ended  # a silent one may be restarting
                # A savepoint that is decided and not finalized is finished by the next run.
                decided = any(asked.id in manifest.requests for manifest in history.retained)
                if gone and history.incarnation_latest and not decided:
                    raise NotAnswered(_over(history))
                if living is not None:
                    require_listener(pipeline, living)
                    mine = msgspec.structs.replace(asked, incarnation=living.incarnation)
                    _leave(mailbox, mine, others, clock.monotonic_ms())
                if newest is not None and clock.monotonic_ms() >= begun_ms + QUIET_MS:
                    fate = _fate(newest, living)
                    if noted != (newest.incarnation, fate):
                        noted = newest.incarnation, fate
                        note(_awaited(pipeline, newest, fate, deadline_ms - clock.monotonic_ms()))
                if clock.monotonic_ms() >= deadline_ms:
                    raise NotAnswered(f"{_late(pipeline, living, timeout_ms)} {_may_still(pipeline, asked)}")
                Event().wait(POLL_S)
        finally:
            with suppress(ExactlyOnceError):  # it is void in the next run, and the next sender replaces it
                present = mailbox.look()
                if present is not None and present.id == asked.id:
                    group_offsets.forget(config, pipeline, {mailbox.place[0]: [mailbox.place[1]]})


def _fate(newest: Incarnation, living: Incarnation | None) -> str:
    """The end of the *newest* incarnation, known or assumed; empty while it seems alive."""
    if newest.ended:
        return "has ended"
    if processes.has_ended(newest):
        return "has died"
    return "" if living is not None else f"has written no heartbeat for {SILENCE_MS // 1000} s"


def _awaited(pipeline: str, newest: Incarnation, fate: str, left_ms: int) -> str:
    """A line for people about the run that a sender waits for."""
    who = f"process {newest.process} on {newest.host}"
    if fate:
        left = shown_duration(max(0, left_ms))
        return (
            f"The run of {pipeline}, {who}, {fate}. If {pipeline} is run again within {left}, that run does what was "
            f"asked."
        )
    beat = shown_duration(max(0, SystemClock().now_ms() - newest.heartbeat_ms))
    return (
        f"Waiting for {who}: its last heartbeat was {beat} ago. It counts as dead after {SILENCE_MS // 1000} s "
        f"without one."
    )


def _may_still(pipeline: str, asked: Asked) -> str:
    if asked.action == SAVEPOINT:
        behind = ", and end behind it" if asked.stop else ""
        return (
            f"{pipeline} was asked for a savepoint, and may still take it{behind}. `exactlyonce savepoints list "
            f"{pipeline}` shows whether it has; a savepoint is kept until `exactlyonce savepoints delete {pipeline} N`."
        )
    if asked.action == DELETE:
        what, look = f"to delete savepoint {asked.checkpoint}", "savepoints list"
    else:
        what, look = "to end as cancelled", "checkpoints"
    return f"{pipeline} was asked {what}, and may still do so: `exactlyonce {look} {pipeline}` shows whether it has."


def _log(config: ClientConfig, pipeline: str) -> History:
    """The decision log; empty while it is deleted, until the new topic has an incarnation."""
    try:
        return read_history(config, pipeline)
    except TopicError:
        try:
            find_topic(config, pipeline)
        except TopicError:
            return History(pipeline)
        return read_history(config, pipeline)  # created again; else this says why it cannot be read


def require_listener(pipeline: str, living: Incarnation) -> None:
    """ConfigError if *living* looks for no requests."""
    if living.bounded:
        raise ConfigError(
            f"{pipeline} is being worked on by process {living.process} on {living.host}, a bounded command, which "
            f"takes no requests: it ends by itself. Ask again then. Ctrl-C there ends it at once, and nothing is lost."
        )


def _leave(mailbox: Mailbox, asked: Asked, others: dict[str, int], now_ms: int) -> None:
    """Leave the request, unless it is there, or the run may not have seen another sender's yet. *others* has the time
    when each of those was first seen: its sender may be gone and never remove it."""
    present = mailbox.look()
    if present == asked:
        return
    if present is not None and present.incarnation == asked.incarnation:
        if now_ms - others.setdefault(present.id, now_ms) < TURN_MS:
            return
        del others[present.id]
    mailbox.ask(asked)


def _over(history: History) -> str:
    latest, newest = history.checkpoint_latest, history.latest
    what = f"Its last checkpoint is {latest}" if latest >= 0 else "Its checkpoints are deleted"
    if newest is not None and newest.is_savepoint and newest.checkpoint == latest:
        what += ", a savepoint, which is kept, taken for another request"
    return (
        f"The run of {history.pipeline} has ended, and not done what it was asked for. {what}. Run it again, and ask "
        f"again."
    )


def _late(pipeline: str, living: Incarnation | None, timeout_ms: int) -> str:
    who = f"Process {living.process} on {living.host}" if living is not None else "The run, which is silent,"
    return (
        f"{who} has not done within {shown_duration(timeout_ms)} what it was asked for. If its checkpoints complete "
        f"(`exactlyonce checkpoints {pipeline}`), allow more time by --timeout; a job on Spark, and a run of an older "
        f"exactlyonce, take no requests."
    )

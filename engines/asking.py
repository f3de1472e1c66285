"""Requests to a coordinator that runs, from any machine: by the pipeline's mailbox; its log answers.

Invariants: the answer is what the decision log says, and nothing else; a request is for the incarnation that lives, so
that none is carried out by a later run that nobody meant; it is taken away when whoever asked is gone. Who waits no
longer, by Ctrl-C or a timeout, is told what the run may still do: it may have seen the request. Two who ask for
the end of one run behind a savepoint get the same one, and two who cancel a run have both done so, whichever request
the run has seen.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Event
from typing import TypeVar

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Incarnation, Manifest
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.connectors.kafka import client as store_client
from exactlyonce.connectors.kafka import group_offsets
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.mailbox import CANCEL, DELETE, SAVEPOINT, Asked, Mailbox
from exactlyonce.connectors.kafka.checkpoint_topic.topic import describe, find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, TopicError
from exactlyonce.pipeline.names import checkpoint_topic

POLL_S = 0.5
TURN_MS = 5_000
"""How long another's request is left there: the run looks every second, so it has seen it by then."""
T = TypeVar("T")
Answer = Callable[[History], T | None]
Note = Callable[[str], None]
"""A function that shows what a person should know."""


class NotAnswered(ExactlyOnceError):
    """A run did not do what it was asked for. Nothing is changed, or it may still do it."""


def savepoint(
    config: ClientConfig, pipeline: str, living: Incarnation, timeout_ms: int, *, stop: bool, note: Note
) -> Manifest:
    """Have the run of *pipeline*, seen as *living*, take a savepoint: its manifest, once it is finalized; and, to
    *stop*, the run has ended."""
    asked = Asked(id=secrets.token_hex(8), incarnation=0, action=SAVEPOINT, stop=stop)

    def answer(history: History) -> Manifest | None:
        made = [each for each in history.retained if asked.id in each.requests and each.checkpoint in history.finalized]
        if made and (not stop or _has_ended(history, made[-1].incarnation)):
            return made[-1]
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
    """Have the run that is seen as *living* in *history*, of *topic*, end as cancelled: the log that says so, whoever
    asked for it.

    Where another topic has its name by now, all is deleted that was in this one: a log without anything. What is in the
    other one belongs to a run that nobody meant.
    """
    asked = Asked(id=secrets.token_hex(8), incarnation=0, action=CANCEL)

    def answer(now: History) -> History | None:  # *now* was read before it is asked which topic there is
        if _made_anew(config, topic, history.pipeline):
            return History(history.pipeline)
        return now if cancelled_since(now, living.incarnation) else None

    return _answered(config, history.pipeline, asked, answer, timeout_ms, note)


def _made_anew(config: ClientConfig, topic: TopicInfo, pipeline: str) -> bool:
    """Whether there is another topic of its name; not while there is none."""
    with suppress(TopicError):
        return find_topic(config.confluent(), pipeline).topic_id != topic.topic_id
    return False


def cancelled_since(history: History, since: int) -> bool:
    """Whether an incarnation, *since* or a later one, was cancelled: one that has begun after it is nobody's to end."""
    return any(each.cancelled for each in history.incarnations.values() if each.incarnation >= since)


def living_run(history: History) -> Incarnation | None:
    """The incarnation that seems to go on, and may be asked; see `History.living`."""
    return history.living(SystemClock().now_ms())


def ended_behind(history: History, since: int) -> Manifest | None:
    """The savepoint behind which an incarnation, *since* or a later one, has ended cleanly, whoever has asked for it.

    It holds all that the run has read, and nothing was decided after it: what one gets who asks for it and for the end.
    """
    newest = history.latest
    if newest is None or not newest.is_savepoint or newest.checkpoint != history.checkpoint_latest:
        return None
    ended = history.incarnations.get(newest.incarnation)
    if ended is None or ended.incarnation < since or not ended.ended or ended.cancelled:
        return None
    return newest if newest.checkpoint in history.finalized else None


def _has_ended(history: History, incarnation: int) -> bool:
    """Whether *incarnation*, or one that took over from it, has: a run begun since is nobody's to stop."""
    since = [each for each in history.incarnations.values() if each.incarnation >= incarnation]
    return living_run(history) is None or any(each.ended for each in since)


def _answered(config: ClientConfig, pipeline: str, asked: Asked, answer: Answer[T], timeout_ms: int, note: Note) -> T:
    try:
        return _waited_for(config, pipeline, asked, answer, timeout_ms)
    except NotAnswered:  # it says so itself
        raise
    except (KeyboardInterrupt, ExactlyOnceError) as error:
        if not isinstance(error, ConfigError):  # then there was nobody to ask
            note(_may_still(pipeline, asked))
        raise


def _waited_for(config: ClientConfig, pipeline: str, asked: Asked, answer: Answer[T], timeout_ms: int) -> T:
    clock = SystemClock()
    deadline_ms = clock.monotonic_ms() + timeout_ms
    others: dict[str, int] = {}
    with closing(Mailbox(config.confluent(), pipeline)) as mailbox:
        try:
            while True:
                history = _log(config, pipeline)
                if (found := answer(history)) is not None:
                    return found
                living, newest = living_run(history), history.newest_incarnation
                gone = newest is None or newest.ended  # one that is silent may be restarting
                if gone and history.incarnation_latest and not _made(history, asked):
                    raise NotAnswered(_over(history))
                if living is not None:
                    require_listener(pipeline, living)
                    mine = msgspec.structs.replace(asked, incarnation=living.incarnation)
                    _leave(mailbox, mine, others, clock.monotonic_ms())
                if clock.monotonic_ms() >= deadline_ms:
                    raise NotAnswered(f"{_late(pipeline, living, timeout_ms)} {_may_still(pipeline, asked)}")
                Event().wait(POLL_S)
        finally:
            _take_away(config, pipeline, mailbox, asked)


def _may_still(pipeline: str, asked: Asked) -> str:
    """A message for a person who has asked and waits no longer."""
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
    """The decision log; empty while somebody deletes it, and until the incarnation is there that says so."""
    try:
        return read_history(config.confluent(), pipeline)
    except TopicError:
        if describe(store_client.admin(config.confluent()), checkpoint_topic(pipeline)) is None:
            return History(pipeline)
        return read_history(config.confluent(), pipeline)  # it has been made anew; or else this says why not


def _made(history: History, asked: Asked) -> bool:
    """Whether a savepoint is decided that is not known to be finalized: the next run finishes it."""
    return any(asked.id in each.requests for each in history.retained)


def require_listener(pipeline: str, living: Incarnation) -> None:
    """ConfigError if *living* is one that looks for no requests."""
    if living.bounded:
        raise ConfigError(
            f"{pipeline} is being worked on by process {living.process} on {living.host}, a bounded command, which "
            f"takes no requests: it ends by itself. Ask again then. Ctrl-C there ends it at once, and nothing is lost."
        )


def _leave(mailbox: Mailbox, asked: Asked, others: dict[str, int], now_ms: int) -> None:
    """Put the request there, unless it is there, or another one is that the run may not have seen yet. *others*: since
    when each of these is there; whoever left it may be gone, and takes it away no more."""
    present = mailbox.look()
    if present == asked:
        return
    if present is not None and present.incarnation == asked.incarnation:
        if now_ms - others.setdefault(present.id, now_ms) < TURN_MS:
            return
        del others[present.id]
    mailbox.ask(asked)


def _take_away(config: ClientConfig, pipeline: str, mailbox: Mailbox, asked: Asked) -> None:
    with suppress(ExactlyOnceError):  # it is void in the next run, and the next who asks puts another there
        present = mailbox.look()
        if present is not None and present.id == asked.id:
            group_offsets.forget(config, pipeline, {mailbox.place[0]: [mailbox.place[1]]})


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

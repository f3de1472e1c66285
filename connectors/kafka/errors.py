"""The errors of brokers and of both client libraries: one table of what each means, and the errors of ours for it.

Invariants: a code has one meaning, whoever meets it; an error that is not known to pass by itself is raised, with what
was being done or with topic, partition and offset. Codes from 0 on are the brokers', the same for both libraries; those
below are librdkafka's own.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from exactlyonce.pipeline.errors import (
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    ExactlyOnceError,
    Halt,
    TopicError,
)

T = TypeVar("T")

PAUSE_FIRST_MS, PAUSE_LONGEST_MS = 5, 1_000
UNKNOWN_SERVER_ERROR, UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID = -1, 3, 100


class Meaning(enum.Enum):
    """What an error calls for."""

    PASSING = "a broker is away, starts, or changes its role: ask again"
    NO_LOGIN = "the login was refused, or not understood"
    NOT_ALLOWED = "the principal lacks a right"
    MISSING = "there is no such topic or partition"
    REMOVED = "the offset is not in the log any more"
    DAMAGED = "a batch is not what was written"
    REFUSED = "anything else, which is not known to pass"


_CODES: dict[Meaning, tuple[int, ...]] = {
    Meaning.PASSING: (
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._NOENT,  # a partition has no leader now
        KafkaError._RESOLVE,
        KafkaError._SSL,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.CONCURRENT_TRANSACTIONS,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.ELIGIBLE_LEADERS_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.FETCH_SESSION_ID_NOT_FOUND,
        KafkaError.INCONSISTENT_TOPIC_ID,
        KafkaError.INVALID_FETCH_SESSION_EPOCH,
        KafkaError.KAFKA_STORAGE_ERROR,  # a disk of its leader has failed, and another broker takes over
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.LISTENER_NOT_FOUND,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_CONTROLLER,
        KafkaError.NOT_COORDINATOR,  # nobody is that of the group or transactional id now
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.PREFERRED_LEADER_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        106,  # FETCH_SESSION_TOPIC_ID_ERROR, for which librdkafka has no name
    ),
    Meaning.NO_LOGIN: (KafkaError._AUTHENTICATION,),
    Meaning.NOT_ALLOWED: (
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ),
    Meaning.MISSING: (
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
    ),
    Meaning.REMOVED: (
        KafkaError.OFFSET_OUT_OF_RANGE,
        KafkaError._AUTO_OFFSET_RESET,
        KafkaError._LOG_TRUNCATION,  # seen by leader epochs, which only reads of inputs give
    ),
    Meaning.DAMAGED: (
        KafkaError._BAD_MSG,  # its checksum is not that of its bytes, or it has not the form of a batch
        KafkaError._BAD_COMPRESSION,
        KafkaError._NOT_IMPLEMENTED,  # its version or its codec is none that there is
        KafkaError._UNDERFLOW,  # a length that cannot be
        KafkaError.INVALID_MSG,  # the broker itself cannot read it
        KafkaError.INVALID_MSG_SIZE,
    ),
}
_MEANINGS = {code: meaning for meaning, codes in _CODES.items() for code in codes}


def meaning_of(error: KafkaError | int) -> Meaning:
    """What *error*, or the code of one, calls for."""
    if isinstance(error, int):
        return _MEANINGS.get(error, Meaning.REFUSED)
    found = meaning_of(error.code())
    if found is Meaning.PASSING and error.fatal():
        return Meaning.REFUSED
    return Meaning.PASSING if found is Meaning.REFUSED and error.retriable() else found


class Again(Exception):
    """The same request may succeed a little later; the text says what stood in the way."""


def retried(
    attempt: Callable[[], T],
    deadline_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The result of *attempt*, made again while it raises `Again`, with growing pauses, until *deadline_s*.

    There is one attempt at least. Raises the last `Again`.
    """
    pause_ms = PAUSE_FIRST_MS
    while True:
        try:
            return attempt()
        except Again:
            left_ms = (deadline_s - clock()) * 1000
            if left_ms <= 0:
                raise
        sleep(min(pause_ms, left_ms) / 1000)
        pause_ms = min(2 * pause_ms, PAUSE_LONGEST_MS)


class DamagedBatch(Halt):
    """A batch of records, of an input or an output, is not what was written."""


def refuse(error_code: int, doing: str) -> None:
    """Raise what the broker's *error_code* calls for, unless it is 0."""
    if error_code == 0:
        return
    from kafka.errors import for_code  # half of a worker's start, which needs none of it

    name = for_code(error_code).__name__
    match meaning_of(error_code):
        case Meaning.MISSING:
            raise TopicError(
                f"{doing} failed: there is no such topic or partition in the cluster. It was deleted, never made, or "
                f"the name is wrong. Create it, or correct the name."
            )
        case Meaning.NOT_ALLOWED:
            raise ConfigError(f"{doing} failed: {name}. The principal we use lacks the right: grant it by an ACL.")
        case Meaning.PASSING:
            raise Again(f"{doing}: {name}")
    if error_code == UNKNOWN_SERVER_ERROR:  # a broker that starts or ends gives it to requests
        raise Again(f"{doing}: {name}")
    raise BrokerRefused(
        f"{doing} failed: the broker answers {name} ({error_code}), which this request should never meet. "
        f"What is decided stays decided, and nothing is lost. See the broker's log for the reason, fix it, and run "
        f"the same again; if the broker is of a version that exactlyonce names as supported, please report it."
    )


@contextmanager
def explained(config: Mapping[str, Any], doing: str) -> Iterator[None]:
    """Turn what librdkafka raises within into our errors; *doing* says what was being done."""
    try:
        yield
    except KafkaException as error:
        raise explanation(config, doing, error.args[0]) from error


def explanation(config: Mapping[str, Any], doing: str, error: KafkaError) -> ExactlyOnceError:
    """The error that says what *error* means while *doing* something with the checkpoint topic."""
    servers, said = config.get("bootstrap.servers", "?"), f"{error.str()} ({error.name()})"
    match meaning_of(error):
        case Meaning.PASSING | Meaning.NO_LOGIN:
            return BrokerUnavailable(
                f"No answer from the broker at {servers} while {doing}: {said}. Check that it runs, that the address "
                f"and port are right, and that its security settings match."
            )
        case Meaning.NOT_ALLOWED:
            return ConfigError(f"The broker at {servers} did not allow {doing}: {said}. Grant the missing permission.")
        case Meaning.MISSING:
            return TopicError(f"The checkpoint topic was missing while {doing}: {said}. Was it deleted?")
    return TopicError(f"The broker at {servers} refused {doing}: {said}.")


def raise_unless_passing(error: KafkaError, place: str, offset: int, reason: str, group: str) -> None:
    """Raise what *error*, met at *place* (a topic or a partition) before *offset* was read, calls for.

    Errors about what is not there are the caller's to tell first. *reason* is the error's text, without secrets, and
    *group* the consumer group.
    """
    match meaning_of(error):
        case Meaning.PASSING:
            return
        case Meaning.DAMAGED:
            raise DamagedBatch(damage(place, offset, reason))
        case Meaning.NOT_ALLOWED | Meaning.NO_LOGIN:
            raise TopicError(
                f"{place} may not be read, from offset {offset} on: {reason}. Grant Read on the topic and on group "
                f"{group}."
            )
    raise TopicError(
        f"{place} cannot be read from offset {offset} on: {reason} ({error.name()}, {error.code()}). This is not known "
        f"to pass by itself. See the broker's log; once the cause is gone, run again: nothing is lost."
    )


def damage(place: str, offset: int, reason: str) -> str:
    """That the record at *offset* of *place*, or its batch, is not what was written, and the choices."""
    return (
        f"{place} is damaged at offset {offset}: {reason.rstrip('.')}. What is stored there is not what was written.\n"
        f"  The records from {offset} to the end of their batch cannot be read, so the pipeline stops before them; "
        f"nothing is lost yet.\n"
        f"  Choices: restore the partition from a replica (make another one its leader) or from a backup, and run "
        f"again; or skip the batch, which loses its records for good: `exactlyonce reset`, and recompute with a start "
        f"behind it."
    )

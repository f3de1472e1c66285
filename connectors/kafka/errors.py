"""The errors of brokers and of both client libraries: one table of their meanings, and our errors for them.

Invariants: a code has one meaning everywhere; an error that is not known to be transient is raised, with the operation
or with topic, partition and offset. Codes from 0 on are the brokers', the same for both libraries; negative ones are
librdkafka's own.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
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


class RangeGone(Halt):
    """Wanted offsets are no longer in the topic, or it was recreated."""


UNKNOWN_SERVER_ERROR, UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID = -1, 3, 100


class Meaning(enum.Enum):
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
        KafkaError.NOT_COORDINATOR,  # no broker coordinates the group or transactional id now
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
        KafkaError._BAD_MSG,  # its checksum does not fit its bytes, or it has not the form of a batch
        KafkaError._BAD_COMPRESSION,
        KafkaError._NOT_IMPLEMENTED,  # its version or its codec is none that there is
        KafkaError._UNDERFLOW,  # a length that cannot be
        KafkaError.INVALID_MSG,  # the broker itself cannot read it
        KafkaError.INVALID_MSG_SIZE,
    ),
}
_MEANINGS = {code: meaning for meaning, codes in _CODES.items() for code in codes}


def meaning_of(error: KafkaError | int) -> Meaning:
    """The meaning of *error*, or of an error code."""
    if isinstance(error, int):
        return _MEANINGS.get(error, Meaning.REFUSED)
    meaning = meaning_of(error.code())
    if meaning is Meaning.PASSING and error.fatal():
        return Meaning.REFUSED
    return Meaning.PASSING if meaning is Meaning.REFUSED and error.retriable() else meaning


class Again(Exception):
    """The same request may succeed a little later; the text names the obstacle."""


class NotAuthorized(ConfigError):
    """The principal lacks a right in Kafka."""


class DamagedBatch(Halt):
    """A batch of records, of an input or an output, is not what was written."""


def refuse(error_code: int, doing: str) -> None:
    """Raise our error for the broker's *error_code*, unless it is 0."""
    if error_code == 0:
        return
    from kafka.errors import for_code  # a worker starts without it, in half the time

    name = for_code(error_code).__name__
    match meaning_of(error_code):
        case Meaning.MISSING:
            raise TopicError(
                f"{doing} failed: the cluster has no such topic or partition. It was deleted or never created, or the "
                f"name is wrong. Create it, or correct the name."
            )
        case Meaning.NOT_ALLOWED:
            raise NotAuthorized(f"{doing} failed: {name}. Our principal lacks the right: grant it by an ACL.")
        case Meaning.PASSING:
            raise Again(f"{doing}: {name}")
    if error_code == UNKNOWN_SERVER_ERROR:  # a broker that starts or ends gives it to requests
        raise Again(f"{doing}: {name}")
    if error_code == KafkaError.INVALID_TIMESTAMP:
        raise BrokerRefused(
            f"{doing} failed: the broker refuses its timestamp. This machine's clock is ahead of the broker's by more "
            f"than the topic allows (message.timestamp.after.max.ms, an hour unless set). Correct the clock. "
            f"Nothing is lost."
        )
    raise BrokerRefused(
        f"{doing} failed: the broker answers {name} ({error_code}), which is unexpected for this request. Decisions "
        f"stand, and nothing is lost. See the broker's log for the reason, fix it, and run the same again; if "
        f"exactlyonce supports the broker's version, please report it."
    )


@contextmanager
def explained(config: Mapping[str, Any], doing: str) -> Iterator[None]:
    """Turn exceptions of librdkafka into our errors; *doing* names the operation."""
    try:
        yield
    except KafkaException as error:
        raise explanation(config, doing, error.args[0]) from error


def explanation(config: Mapping[str, Any], doing: str, error: KafkaError) -> ExactlyOnceError:
    """Our error for *error*, met while *doing* something with the checkpoint topic."""
    servers, reason = config.get("bootstrap.servers", "?"), f"{error.str()} ({error.name()})"
    match meaning_of(error):
        case Meaning.PASSING | Meaning.NO_LOGIN:
            return BrokerUnavailable(
                f"No answer from the broker at {servers} while {doing}: {reason}. Check that it runs, that the address "
                f"and port are right, and that its security settings match."
            )
        case Meaning.NOT_ALLOWED:
            return NotAuthorized(
                f"The broker at {servers} did not allow {doing}: {reason}. Grant the missing permission."
            )
        case Meaning.MISSING:
            return TopicError(f"The checkpoint topic was missing while {doing}: {reason}. Was it deleted?")
    return TopicError(f"The broker at {servers} refused {doing}: {reason}.")


def raise_unless_passing(error: KafkaError, place: str, offset: int, reason: str, group: str) -> None:
    """Raise our error for *error*, met at *place* (a topic or a partition) before *offset* was read.

    The caller handles `MISSING` and `REMOVED` first. *reason* is the error's text, without secrets, and *group* the
    consumer group.
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
        f"to be transient. See the broker's log; once the cause is gone, run again: nothing is lost."
    )


def damage(place: str, offset: int, reason: str) -> str:
    """The message about a damaged batch at *offset* of *place*, with the choices."""
    return (
        f"{place} is damaged at offset {offset}: {reason.rstrip('.')}. The stored bytes are not those written.\n"
        f"  The records from {offset} to the end of their batch cannot be read, so the pipeline stops before them; "
        f"nothing is lost yet.\n"
        f"  Choices: restore the partition from a replica (make another one its leader) or from a backup, and run "
        f"again; or skip the batch, which loses its records for good: `exactlyonce reset`, and recompute from after it."
    )

"""The errors that a consumer hands out instead of a record, and their meaning; the same for all that read topics.

Invariant: an error that is not known to pass by itself is raised, with topic, partition and the offset that comes next.
Which errors pass is one list, `store_client.is_passing`: brokers that are away or change their roles, which librdkafka
itself tries again. Two lists of `store_scan` say which mean damage and which that records were removed; those that only
readers of inputs and outputs meet are added here. There is no other kind.
"""

from __future__ import annotations

from confluent_kafka import KafkaError

from exactlyonce.connectors.kafka.client import DAMAGED, REMOVED, is_passing
from exactlyonce.pipeline.errors import ExactlyOnceError, Halt, TopicError

RETENTION_ERRORS = REMOVED | {KafkaError._LOG_TRUNCATION}  # seen by leader epochs, which only reads of inputs give
TOPIC_ERRORS = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
)
RIGHTS_ERRORS = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
)
DAMAGE_ERRORS = DAMAGED | {KafkaError._UNDERFLOW, KafkaError.INVALID_MSG_SIZE}  # and lengths that cannot be


class DamagedBatch(Halt):
    """A batch of records, of an input or an output, is not what was written."""


def raise_unless_passing(error: KafkaError, place: str, offset: int, reason: str, group: str) -> None:
    """Raise what *error*, met at *place* (a topic or a partition) before *offset* was read, calls for.

    Errors about what is not there are the caller's to tell first. *reason* is the error's text, without secrets, and
    *group* the consumer group.
    """
    if not error.fatal() and is_passing(error):
        return
    raise _refused(error, place, offset, reason, group)


def _refused(error: KafkaError, place: str, offset: int, reason: str, group: str) -> ExactlyOnceError:
    if error.code() in DAMAGE_ERRORS:
        return DamagedBatch(damage(place, offset, reason))
    if error.code() in RIGHTS_ERRORS:
        return TopicError(
            f"{place} may not be read, from offset {offset} on: {reason}. Grant Read on the topic and on group {group}."
        )
    return TopicError(
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

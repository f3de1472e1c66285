"""Every error that a person can meet, as one tree.

    ExactlyOnceError
    ├── UserError               what the user can fix; shown without a traceback
    │   ├── GraphError          the pipeline is wrong; raised while it is built
    │   │   └── UnsupportedType     pipeline.schema: no codec can write the type
    │   ├── ConfigError         a setting is missing, wrong or contradicts another
    │   │   ├── DeletedSavepoint    engines.savepoints.exported: it is deleted while it is read
    │   │   └── UnreadableBlock     checkpoint.block_storage: its storage refuses to read it, for want of a right say
    │   ├── TopicError          a topic is missing, or is not what the pipeline needs
    │   ├── RecordError         a record cannot be decoded, or a user's function raised on it
    │   ├── BrokerUnavailable   no broker answers (retriable)
    │   │   └── StorageUnavailable  nor does, or is full, a checkpoint storage outside of the topic (retriable)
    │   ├── StoreError          a store refuses: a password, a table, a column, a right, a value that does not fit
    │   │   ├── NoSuchObject        sinks.postgres.refusals: what a statement names is not there
    │   │   └── UnknownTransaction  sinks.mysql.refusals: the server knows no such transaction, which proves nothing
    │   ├── StoreUnavailable    a store does not answer (retriable)
    │   │   └── LockHeld            sinks.postgres.refusals: another session holds a lock that was waited for
    │   ├── Unavailable         the user's code asks something that does not answer; users raise it too (retriable)
    │   ├── StateUnstorable     state.errors: a state is not of its operator's declared type
    │   └── StateIncompatible   state.errors: the checkpoint's state is of another type
    ├── BrokerRefused           a broker answers with an error that no rule covers; asking again would not help
    ├── Fenced                  a newer instance of this pipeline has taken over; this one ends
    ├── Undetermined            what became of a decision cannot be learnt here; the next incarnation reads it
    ├── Halt                    going on would lose or double records: says which, and the choices
    │   ├── DamagedRecord       checkpoint.records.encoding: a record of the checkpoint topic is not as written
    │   │   └── DamagedBlock        checkpoint.block_storage: a block is missing, or is not what was written
    │   ├── DamagedSavepoint    engines.savepoints.exported: a file of an exported savepoint is not as written
    │   ├── DamagedState        state.errors: what blocks hold is not the state that the checkpoint names
    │   ├── DamagedBatch        connectors.kafka.errors: a batch of an input or an output is not as written
    │   ├── RangeGone           connectors.kafka.range_reader: offsets to be read are no longer in the topic
    │   └── RecordsGone         connectors.kafka.log: a transaction's records are no longer all in the log
    ├── OutputLost              at the end of a run some output of a sink that delivers at most once is unwritten
    ├── EndedAtOnce             asked to stop twice, the run has ended without a last checkpoint; nothing is lost
    │   └── StoppedShort        asked to stop, it has ended before its last checkpoint was complete
    ├── EndedEarly              asked to stop, a bounded run has ended cleanly before it had read all
    ├── InvariantViolation      a defect of exactlyonce itself; never the user's fault
    │   └── TooLarge            checkpoint.records.encoding: a record of the checkpoint topic is over its limit
    ├── SnapshotDeclined        state.errors: a snapshot cannot be taken now; a later checkpoint can
    │   └── DiskFull                state.tiered.store: no room for local files; what needs it waits
    ├── LocalFilesFailed        state.tiered.store: RocksDB failed on its files; the job restarts, and reads blocks
    ├── OpenFailed              engines.runtime.assembler: a user's open() raised; the job restarts
    ├── AnotherLeads            checkpoint.succession: it is left alone for now; the run waits, and looks again
    ├── NotAnswered             engines.asking: a run has not done what it was asked for
    ├── SinkFailed              sinks.writer: a sink could not write; the job restarts
    ├── StageFailed             engines.spark.submit: Spark could not finish a stage; the command is run again
    └── PeerGone                engines.local.channels: another worker is gone; the job restarts

Every message says what happened, whose fault it is, and what to do. All of them survive pickling and carry no secret.
"""

from __future__ import annotations

import re
from asyncio import CancelledError
from collections.abc import Mapping, Sized

INTERRUPTED = 128 + 2
"""As the shell gives it to a command that Ctrl-C has ended."""
Facts = dict[str, str | int]
"""What an error is about, by name, for programs: operator (also a source or a sink), topic, partition, offset, ..."""
_CHOICES = re.compile(r"^  Choices: (.*?)\.?$", re.MULTILINE)
_BEFORE_A_CHOICE = re.compile(r"^(or )?(\(\d\) )?")


class ExactlyOnceError(Exception):
    """The root of the tree.

    Keyword arguments are its `facts`: what its message says in words, for programs.

    >>> RecordError("orders[0] offset 7 is no Order.", topic="orders", partition=0, offset=7).facts["offset"]
    7
    """

    exit_code = 1
    """What the `exactlyonce` command ends with."""
    facts: Mapping[str, str | int] = {}

    def __init__(self, *args: object, **facts: str | int) -> None:
        super().__init__(*args)
        if facts:
            self.facts = facts


class UserError(ExactlyOnceError):
    """Something the user can fix."""

    exit_code = 2


class GraphError(UserError):
    """The pipeline cannot be built as it is written."""


class ConfigError(UserError):
    """A setting is missing, wrong, or contradicts another one."""


class TopicError(UserError):
    """A topic is missing or is not what the pipeline needs."""


class RecordError(UserError):
    """A record cannot be processed. Its message names topic, partition and offset."""

    exit_code = 3


class BrokerUnavailable(UserError):
    """No broker answers at the given address."""

    exit_code = 4


class StorageUnavailable(BrokerUnavailable):
    """The checkpoint storage, where that is not the topic, does not answer or is full.

    To whoever waits it is what an absent broker is: both together keep checkpoints.
    """


class StoreError(UserError):
    """A store other than Kafka refuses what a sink asks of it. The message names what is missing, and how to add it."""


class StoreUnavailable(UserError):
    """A store other than Kafka does not answer, or has not told what became of a request."""

    exit_code = 4


class Unavailable(UserError):
    """Something that a codec or a function asks, such as a schema registry, does not answer.

    Raise it in code of your own where no OSError says so. No record is skipped for it: the job restarts from its last
    checkpoint, and does the work again.
    """

    exit_code = 4


class BrokerRefused(ExactlyOnceError):
    """A broker answered, but with an error that is none of those that a request of ours may meet.

    It is no absence: whoever waits for a broker that is away must not take it for one, or it waits permanently.
    """

    exit_code = 8


class Fenced(ExactlyOnceError):
    """A newer instance of this pipeline took over. This one has ended and has lost nothing."""

    exit_code = 5


class Undetermined(ExactlyOnceError):
    """The outcome of a write to the decision log is unknown. This incarnation ends; the next one reads what is true."""

    exit_code = 7


class OutputLost(ExactlyOnceError):
    """A run has ended after its last checkpoint, and output that was to be written then, at most once, was not."""


class EndedAtOnce(ExactlyOnceError):
    """A second request to stop: workers are killed, nothing is ended or closed. The next run takes it up."""

    exit_code = INTERRUPTED


class StoppedShort(EndedAtOnce):
    """A run was stopped, and got no last checkpoint. The next one goes on from the checkpoint before."""

    exit_code = 9


class EndedEarly(ExactlyOnceError):
    """A request to stop came before the end that the run was to have. It ended cleanly; the next run goes on."""

    exit_code = INTERRUPTED


class Halt(ExactlyOnceError):
    """Going on would break the guarantee. The message names the checkpoint, the offsets and the choices.

    Choices are a line of the message, as below: one sentence, divided by semicolons.

    >>> Halt("It is gone.\\n  Choices: (1) restore it; or (2) `exactlyonce reset orders`.").choices
    ['restore it', '`exactlyonce reset orders`']
    """

    exit_code = 6

    @property
    def choices(self) -> list[str]:
        """What its message lists; empty where there is one thing to do, or none."""
        listed = _CHOICES.search(str(self))
        return [_BEFORE_A_CHOICE.sub("", each) for each in listed[1].split("; ")] if listed else []


class InvariantViolation(ExactlyOnceError):
    """A rule of the protocol was about to be broken: a defect of exactlyonce. Nothing was written."""

    exit_code = 70


USERS_ERRORS = (Exception, SystemExit, CancelledError)
"""What the user's code may end with on a record; sys.exit() among them, for it would end a worker without a word, and
what asyncio raises in a task that was cancelled, which is no `Exception`. An interrupt is nobody's error."""


def require_whole(made: Sized, count: int) -> None:
    """Raise the StopIteration of a user's function that `map` has taken for the end of what it maps over: *made* is to
    have *count* items.

    >>> require_whole(list(map(next, [iter("a"), iter(""), iter("c")])), 3)
    Traceback (most recent call last):
        ...
    StopIteration: a next() has found nothing
    """
    if len(made) < count:
        raise StopIteration("a next() has found nothing")


def text_of(error: BaseException) -> str:
    """What *error*, which may be the user's own, says; see `sendable`."""
    try:
        return sendable(str(error))
    except Exception as raised:
        return f"(it cannot say what: its text raised {type(raised).__name__})"


def sendable(text: str) -> str:
    r"""*text* in characters that UTF-8 has: half a pair, which stands for a byte that was no text, is written out.

    >>> sendable("caf\udce9")
    'caf\\udce9'
    """
    return text.encode(errors="backslashreplace").decode()


def is_fatal(error: ExactlyOnceError) -> bool:
    """Whether another attempt would meet *error* again.

    >>> is_fatal(ConfigError("no such setting")), is_fatal(BrokerUnavailable("it restarts"))
    (True, False)
    """
    fatal = isinstance(error, (UserError, BrokerRefused, Halt, Fenced, InvariantViolation))
    return fatal and not isinstance(error, (BrokerUnavailable, StoreUnavailable, Unavailable))


def class_name(error: ExactlyOnceError) -> str:
    """The nearest class of *error* that is defined here: another process knows it, and makes the error from it."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)


def made_from(name: str, text: str, facts: Facts) -> ExactlyOnceError:
    """The error that another process has told of by its `class_name`, its message and its facts."""
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, ExactlyOnceError)):
        raise InvariantViolation(f"Another process told of an unknown error {name!r}: {text}")
    return kind(text, **facts)


def require(condition: object, rule: str) -> None:
    """Raise `InvariantViolation` naming *rule* unless *condition* holds; unlike `assert`, also under ``python -O``."""
    if not condition:
        raise InvariantViolation(f"{rule}. This is a defect of exactlyonce: please report it with the log.")

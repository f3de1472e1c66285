"""Every error that a person can meet, as one tree.

    ExactlyOnceError
    ├── UserError               what the user can fix; shown without a traceback
    │   ├── GraphError          the pipeline is wrong; raised while it is built
    │   │   └── UnsupportedType     pipeline.shape: no codec can write the type
    │   ├── ConfigError         a setting is missing, wrong or contradicts another
    │   │   ├── NotAuthorized       connectors.kafka.errors: the principal lacks a right in Kafka
    │   │   ├── DeletedSavepoint    engines.savepoints.exported: it is deleted while it is read
    │   │   └── UnreadableBlock     checkpoint.block_storage: its storage refuses to read it, say for want of a right
    │   ├── TopicError          a topic is missing, or is not what the pipeline needs
    │   ├── RecordError         a record cannot be decoded, or a user's function raised on it
    │   ├── BrokerUnavailable   no broker answers (retriable)
    │   │   └── StorageUnavailable  a checkpoint storage outside of the topic does not answer, or is full (retriable)
    │   ├── StoreError          a store refuses: a password, a table, a column, a right, a value that does not fit
    │   │   └── RecordsRefused      a store refuses single records, and would take the others
    │   ├── StoreUnavailable    a store does not answer (retriable)
    │   │   ├── StoreUnready        it answers, and takes nothing: it is busy, or the sink is configured wrong
    │   │   ├── LockHeld            connectors.postgres.connection: another session holds a lock
    │   │   └── LogMissing          connectors.postgres.change_stream: a server lacks changes; its source halts
    │   ├── Unavailable         a service of the user's code does not answer; users raise it too (retriable)
    │   ├── StateUnstorable     state.errors: a state is not of its operator's declared type
    │   └── StateIncompatible   state.errors: the checkpoint's state is of another type
    ├── BrokerRefused           a broker answers with an unexpected error; a retry would not help
    │   └── Outdated                its settings are no longer those that the run began with; the next incarnation asks
    ├── Fenced                  a newer instance of this pipeline has taken over; this one ends
    ├── Undetermined            the outcome of a decision is unknown here; the next incarnation reads it
    ├── Halt                    going on would lose or double records; the message has the choices
    │   ├── DamagedRecord       checkpoint.records.encoding: a record of the checkpoint topic is not as written
    │   │   └── DamagedBlock        checkpoint.block_storage: a block is missing, or is not what was written
    │   ├── DamagedSavepoint    engines.savepoints.exported: a file of an exported savepoint is not as written
    │   ├── DamagedState        state.errors: blocks do not hold the state that the checkpoint names
    │   ├── DamagedBatch        connectors.kafka.errors: a batch of an input or an output is not as written
    │   ├── RangeGone           connectors.kafka.errors: offsets to be read are no longer in the topic
    │   └── RecordsGone         connectors.kafka.log: a transaction's records are no longer all in the log
    ├── OutputLost              at the end of a run, output of a sink that delivers at most once is not written
    ├── EndedAtOnce             stopped twice, the run has ended without a last checkpoint; nothing is lost
    │   └── StoppedShort        stopped, it has ended before its last checkpoint was complete
    ├── EndedEarly              stopped, a bounded run has ended cleanly before its end
    ├── InvariantViolation      a defect of exactlyonce itself; never the user's fault
    │   └── TooLarge            checkpoint.records.encoding: a record of the checkpoint topic is over its limit
    ├── SnapshotDeclined        state.errors: a snapshot cannot be taken now; a later checkpoint can
    │   └── DiskFull                state.rocksdb.store: no room for local files; writes wait
    ├── LocalFilesFailed        state.rocksdb.store: RocksDB failed on its files; the job restarts from blocks
    ├── OpenFailed              engines.runtime.assembler: a user's open() raised; the job restarts
    ├── AnotherLeads            checkpoint.succession: another run leads; this one waits, and looks again
    ├── NotAnswered             engines.run_requests: a run has not carried out a request
    ├── SinkFailed              sinks.writer: a sink could not write; the job restarts
    ├── StageFailed             engines.spark.submit: Spark could not finish a stage, for no error above
    └── PeerGone                engines.local.channels: another worker is gone; the job restarts

Every message says what happened, whose fault it is, and what to do. All errors survive pickling and have no secrets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized

INTERRUPTED = 128 + 2
"""The exit code that a shell reports after Ctrl-C."""
Facts = dict[str, str | int]
"""The subject of an error, for programs: operator (also a source or a sink), topic, partition, offset, ..."""
_CHOICES = re.compile(r"^  Choices: (.*?)\.?$", re.MULTILINE)
_BEFORE_A_CHOICE = re.compile(r"^(or )?(\(\d\) )?")


class ExactlyOnceError(Exception):
    """The root of the tree.

    Keyword arguments are its `facts`: its subject, for programs.

    >>> RecordError("orders[0] offset 7 is not Order.", topic="orders", partition=0, offset=7).facts["offset"]
    7
    """

    exit_code = 1
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
    """The checkpoint storage outside of the topic does not answer, or is full: as bad as an absent broker."""


class StoreError(UserError):
    """A store other than Kafka refuses a request. The message names the missing thing, and the remedy."""


class RecordsRefused(StoreError):
    """A store refuses single records of a sink, and would take the others. *remedy* is a choice, for a sentence."""

    def __init__(self, text: str, records: int = 1, remedy: str = "") -> None:
        super().__init__(text)
        self.records, self.remedy = records, remedy


ASKED_AGAIN = "Nothing is lost: it is asked again."
"""The end of a `StoreUnavailable` that is waited for; not of one that ends the run."""


class StoreUnavailable(UserError):
    """A store other than Kafka does not answer, or the outcome of a request is unknown."""

    exit_code = 4

    @property
    def what(self) -> str:
        """Its text without `ASKED_AGAIN`."""
        return str(self).removesuffix(ASKED_AGAIN).rstrip()


class StoreUnready(StoreUnavailable):
    """A store answers, but takes nothing now. The message has its answer and, if the sink is wrong, what to correct.

    *status* is that of an answer over HTTP; 0: there is none.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Unavailable(UserError):
    """A service that a codec or a function uses, such as a schema registry, does not answer.

    Raise it in code of your own if no OSError comes. No record is skipped for it: the job restarts from its last
    checkpoint, and repeats the work.
    """

    exit_code = 4


class BrokerRefused(ExactlyOnceError):
    """A broker answered with an unexpected error. It is no outage: a retry would wait permanently."""

    exit_code = 8


class Outdated(BrokerRefused):
    """A broker's settings are no longer those that this incarnation asked for. It ends, and the next one asks again."""


class Fenced(ExactlyOnceError):
    """A newer instance of this pipeline took over. This one has ended and has lost nothing."""

    exit_code = 5


class Undetermined(ExactlyOnceError):
    """The outcome of a write to the decision log is unknown. This incarnation ends; the next one reads the outcome."""

    exit_code = 7


class OutputLost(ExactlyOnceError):
    """A run has ended after its last checkpoint, without all output of a sink that delivers at most once."""


class EndedAtOnce(ExactlyOnceError):
    """After a second request to stop, workers were killed. The next run aborts or commits their transactions."""

    exit_code = INTERRUPTED


class StoppedShort(EndedAtOnce):
    """A run was stopped without a last checkpoint. The next one goes on from the checkpoint before."""

    exit_code = 9


BEFORE_ANYTHING_RAN = "Stopped, as asked for, before anything ran. Nothing is lost."
"""The text of a `StoppedShort`."""


class EndedEarly(ExactlyOnceError):
    """A request to stop came before the end of a bounded run. It ended cleanly; the next run goes on."""

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
        """The choices in the message; empty if there are none to choose from."""
        listed = _CHOICES.search(str(self))
        return [_BEFORE_A_CHOICE.sub("", choice) for choice in listed[1].split("; ")] if listed else []


class InvariantViolation(ExactlyOnceError):
    """A rule of the protocol was about to be broken: a defect of exactlyonce. Nothing was written."""

    exit_code = 70


def users_errors() -> tuple[type[BaseException], ...]:
    """The exceptions of the user's code on a record: also of sys.exit(), which would end a worker silently, and of a
    cancelled task of asyncio, which is no `Exception`. An interrupt is not among them.

    For an except clause, which calls it once something is raised: the help of the command loads no asyncio.
    """
    from asyncio import CancelledError

    return (Exception, SystemExit, CancelledError)


class UsersTraceback(Exception):
    """The traceback of an exception that a user's function raised in another process.

    It is the `__cause__` of the error that names the record, so that Python and notebooks show it first.
    """

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def require_whole(made: Sized, count: int) -> None:
    """Raise the StopIteration of a user's function that ended a `map` early: *made* must have *count* items.

    >>> require_whole(list(map(next, [iter("a"), iter(""), iter("c")])), 3)
    Traceback (most recent call last):
        ...
    StopIteration: a next() has found nothing
    """
    if len(made) < count:
        raise StopIteration("a next() has found nothing")


def text_of(error: BaseException) -> str:
    """The text of *error*, which may be of a user's class; see `sendable`."""
    try:
        return sendable(str(error))
    except Exception as raised:
        return f"(it cannot say what: its text raised {type(raised).__name__})"


def sendable(text: str) -> str:
    r"""*text* with surrogates, which stand for undecodable bytes, written out: UTF-8 lacks them.

    >>> sendable("caf\udce9")
    'caf\\udce9'
    """
    return text.encode(errors="backslashreplace").decode()


def is_fatal(error: ExactlyOnceError) -> bool:
    """Whether a retry would meet *error* again.

    >>> is_fatal(ConfigError("no such setting")), is_fatal(BrokerUnavailable("it restarts"))
    (True, False)
    """
    fatal = isinstance(error, (UserError, BrokerRefused, Halt, Fenced, InvariantViolation))
    return fatal and not isinstance(error, (BrokerUnavailable, StoreUnavailable, Unavailable))


def class_name(error: ExactlyOnceError) -> str:
    """The nearest class of *error* that is defined here, for `made_from` in another process."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)


def made_from(name: str, text: str, facts: Facts) -> ExactlyOnceError:
    """The error of another process, from its `class_name`, message and facts."""
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, ExactlyOnceError)):
        raise InvariantViolation(f"Another process reported an unknown error {name!r}: {text}")
    return kind(text, **facts)


def require(condition: object, rule: str) -> None:
    """Raise `InvariantViolation` naming *rule* unless *condition* holds; unlike `assert`, also under ``python -O``."""
    if not condition:
        raise InvariantViolation(f"{rule}. This is a defect of exactlyonce: please report it with the log.")

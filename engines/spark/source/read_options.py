"""The options of `spark.read` and `spark.readStream`, checked: of topics, in Spark's own words, of state, of history.

Invariants: nothing is opened; an unknown or useless option is an error that names the known ones; a reference to a
secret (`env:NAME`, `file:/path`) stays one, in every process, until a client is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.storage_url import is_url, storage_url
from exactlyonce.connectors.kafka.topics import EARLIEST, LATEST
from exactlyonce.engines.spark.client_options import KAFKA, ClientOptions, client_settings_in
from exactlyonce.pipeline.durations import duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import name_problem
from exactlyonce.pipeline.positions import TIME, Positions

START = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
END = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
TOPICS = ("subscribe", "subscribePattern", "assign")
"""The options that name topics: one of them is given."""
CUT = ("pipeline", "checkpoint", "asOf", "after")
"""The options that choose checkpoints, up to which, and after which, topics are read."""
AFTER = "after"
BATCH_ONLY, STREAM_ONLY = (
    (*END, *CUT), ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "commitGroupId")
)  # fmt: skip
TYPES_ONLY = ("params", "mode")
OPTIONS = (
    *TOPICS, *START, *END, *CUT, "failOnDataLoss", "includeHeaders", *STREAM_ONLY, "minPartitions", "types", *TYPES_ONLY
)  # fmt: skip
NOT_HERE = {
    "startingOffsetsByTimestampStrategy": (
        "a time after the last record of a partition is its end, as if its value were latest; leave it out"
    ),
    "maxRecordsPerPartition": "minPartitions reads large partitions by several tasks",
    "groupIdPrefix": (
        "no group is made up; kafka.group.id names it, if the cluster wants a certain one, and commitGroupId names the "
        "one that shows the lag of a stream"
    ),
    "kafkaConsumer.pollTimeoutMs": "a task waits a minute for the next record; leave it out",
    "fetchOffset.numRetries": "questions for offsets are repeated for ten seconds; leave it out",
    "fetchOffset.retryIntervalMs": "questions for offsets are repeated for ten seconds; leave it out",
}
"""The options that Spark's own source has and this one has not, each with the reason or the alternative."""
TRIGGER_DELAY_DEFAULT = "15m"
STATE = "state"
"""The option that makes a read one of state."""
STATE_OPTIONS = (STATE, "operator", "checkpoint", "asOf", "key", "keyType", "types", "params", "json", "minPartitions")
HISTORY = "history"
"""The option that makes a read one of the checkpoints."""
IN_TOPIC_ONLY = ("checkpoint", "asOf", "minPartitions")
KEY_TYPES = ("bool", "bytes", "date", "datetime", "decimal", "float", "int", "str", "time", "timedelta", "uuid")
_NAMED = {"earliest": EARLIEST, "latest": LATEST}


class Mode(Enum):
    """The treatment of a record that its codec or its column refuses, in Spark's words."""

    FAILFAST = "FAILFAST"
    """It is an error."""
    DROPMALFORMED = "DROPMALFORMED"
    """It is left out."""
    PERMISSIVE = "PERMISSIVE"
    """Its refused parts are null, and another column has its bytes."""


ByPartition = Mapping[str, Mapping[int, int]]
"""Numbers by topic and partition."""


@dataclass(frozen=True)
class Bound:
    """The user's start or end of the ranges: one number for all partitions, or one for each."""

    option: str
    number: int = LATEST
    by_partition: ByPartition | None = None
    timestamps: bool = False
    """The numbers are milliseconds since 1970, not offsets."""


@dataclass(frozen=True)
class CutOptions:
    """The choice of a checkpoint."""

    pipeline: str
    checkpoint: int | None
    moment: datetime | None
    """The newest one that was complete then. Without both, the newest."""
    after: int | None
    """The checkpoint after which the read begins; None: it begins as any other."""


@dataclass(frozen=True)
class ReadOptions(ClientOptions):
    topics: tuple[str, ...]
    """The names of the topics; empty: `pattern` is given."""
    pattern: str | None
    """A regular expression of the whole names of topics."""
    assigned: Mapping[str, frozenset[int]] | None
    """The partitions to read of each topic; None: all."""
    start: Bound
    end: Bound
    fail_on_data_loss: bool
    include_headers: bool
    partitions_min: int
    offsets_per_trigger_max: int | None
    offsets_per_trigger_min: int | None
    trigger_delay_max_ms: int
    """The wait of fewer offsets than the least."""
    commit_group: str
    """The group to which a stream commits the offsets of finished batches; empty: none."""
    types: str
    """`module:attribute` of a pipeline whose sources have the types of the topics; empty: keys and values are bytes."""
    params: Mapping[str, str]
    mode: Mode
    cut: CutOptions | None
    """The checkpoint up to which the topics of a pipeline are read; None: records are read whoever wrote them."""

    def matches(self, name: str) -> bool:
        """Whether the topic *name* is read."""
        if self.pattern is None:
            return name in self.topics
        return re.fullmatch(self.pattern, name) is not None


def parse_read_options(given: Mapping[str, str], *, streaming: bool | None = None) -> ReadOptions:
    """Check and parse; *streaming* as far as it is known. Names may be written in any case, as always in Spark."""
    options = {name.lower(): value for name, value in given.items()}
    kafka = client_settings_in(options)
    _refuse_unknown(options, OPTIONS)
    misplaced = [name for name in (BATCH_ONLY if streaming else STREAM_ONLY) if name.lower() in options]
    if streaming is not None and misplaced:
        kinds = ("streams, which have no end", "spark.read") if streaming else ("spark.read", "streams")
        raise ConfigError(f"{', '.join(misplaced)} is not for {kinds[0]}: it is for {kinds[1]}. Leave it out.")
    _require_servers(kafka)
    topics, pattern, assigned = _subscription(options)
    parsed = ReadOptions(
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        start=_bound(options, START, LATEST if streaming else EARLIEST),
        end=_bound(options, END, LATEST),
        fail_on_data_loss=flag(options, "failOnDataLoss", True),
        include_headers=flag(options, "includeHeaders", False),
        partitions_min=count(options, "minPartitions") or 1,
        offsets_per_trigger_max=count(options, "maxOffsetsPerTrigger"),
        offsets_per_trigger_min=count(options, "minOffsetsPerTrigger"),
        trigger_delay_max_ms=duration_ms(options.get("maxtriggerdelay", TRIGGER_DELAY_DEFAULT), "maxTriggerDelay"),
        commit_group=options.get("commitgroupid", "").strip(),
        types=options.get("types", ""),
        params=_params(options.get("params", "{}")),
        mode=_mode(options.get("mode", Mode.FAILFAST.value)),
        cut=_cut(options),
        client_settings=kafka,
    )
    if parsed.offsets_per_trigger_min is None and "maxtriggerdelay" in options:
        raise ConfigError("maxTriggerDelay is the longest wait for minOffsetsPerTrigger. Give both, or leave it out.")
    if "commitgroupid" in options and not parsed.commit_group:
        raise ConfigError("commitGroupId is empty: name the consumer group that is to show the lag, or leave it out.")
    if not parsed.types and (useless := [name for name in TYPES_ONLY if name in options]):
        raise ConfigError(f"{useless[0]} is for a read by types. Leave it out, or give types.")
    _refuse_impossible(parsed, streaming)
    parsed.client()
    return parsed


def _cut(options: Mapping[str, str]) -> CutOptions | None:
    pipeline, (checkpoint, moment) = options.get("pipeline", "").strip(), _checkpoint(options)
    if not pipeline:
        if useless := [name for name in CUT if name.lower() in options]:
            raise ConfigError(
                f"{' and '.join(useless)} choose a checkpoint of a pipeline that reads or writes the topics. Give its "
                f"name by the option pipeline, or leave them out."
            )
        return None
    if problem := name_problem(pipeline):
        raise ConfigError(f"pipeline: the name of a pipeline, {problem}.")
    if ends := [name for name in END if name.lower() in options]:
        raise ConfigError(f"pipeline ends the read at a checkpoint, and {ends[0]} elsewhere. Keep one of them.")
    if not flag(options, "failOnDataLoss", True):
        raise ConfigError("pipeline asks for all records of a checkpoint: leave failOnDataLoss out.")
    after = number(AFTER, options[AFTER]) if AFTER in options else None
    if after is not None and (starts := [name for name in START if name.lower() in options]):
        raise ConfigError(f"after begins the read at a checkpoint, and {starts[0]} elsewhere. Keep one of them.")
    if after is not None and checkpoint is not None and after >= checkpoint:
        raise ConfigError(f"after is {after}, and checkpoint {checkpoint}: nothing lies between. Give an older after.")
    return CutOptions(pipeline, checkpoint, moment, after)


def _checkpoint(options: Mapping[str, str]) -> tuple[int | None, datetime | None]:
    """The options checkpoint and asOf."""
    if "checkpoint" in options and "asof" in options:
        raise ConfigError("checkpoint and asOf contradict each other. Keep one of them.")
    if "checkpoint" in options:
        return number("checkpoint", options["checkpoint"]), None
    if "asof" not in options:
        return None, None
    moment = Positions("asOf", (TIME,)).read(options["asof"].strip())
    assert isinstance(moment, datetime), "it takes times alone"
    return None, moment


def _refuse_unknown(options: Mapping[str, str], offered: Sequence[str], kind: str = "") -> None:
    known = {name.lower() for name in offered}
    unknown = sorted(name for name in options if name not in known and not name.startswith(KAFKA))
    for name, reason in NOT_HERE.items():
        if name.lower() in unknown:
            raise ConfigError(f"There is no option {name}{kind}, unlike in Spark's own source: {reason}.")
    if unknown:
        raise ConfigError(
            f"There is no option {', '.join(map(repr, unknown))}{kind}. Options are: {', '.join(offered)}, and "
            f"kafka.NAME for any setting of librdkafka, as kafka.bootstrap.servers."
        )


def _subscription(options: Mapping[str, str]) -> tuple[tuple[str, ...], str | None, dict[str, frozenset[int]] | None]:
    """Topics, pattern and assigned partitions of `ReadOptions`."""
    given = [name for name in TOPICS if options.get(name.lower(), "").strip(" ,")]
    if len(given) != 1:
        raise ConfigError(
            f"{' and '.join(given)} contradict each other. Keep one of them."
            if given
            else "subscribe is not set. Name the topics, separated by commas; or give subscribePattern or assign."
        )
    (name,) = given
    text = options[name.lower()].strip()
    if name == "subscribePattern":
        _require_pattern(text)
        return (), text, None
    if name == "subscribe":
        return tuple(dict.fromkeys(topic.strip() for topic in text.split(",") if topic.strip())), None, None
    assigned = _assigned(text)
    return tuple(assigned), None, assigned


def _require_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"subscribePattern is {pattern!r}, which cannot be read ({error}). Write a regular expression of Python "
            f"for the whole names of topics, as orders-.*"
        ) from None


def _assigned(text: str) -> dict[str, frozenset[int]]:
    try:
        assigned = msgspec.json.decode(text, type=dict[str, frozenset[int]])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'assign is {text!r}, which cannot be read ({error}). Write the partitions by topic: {{"orders": [0, 2]}}.'
        ) from None
    if not assigned or not all(assigned.values()):
        raise ConfigError(f'assign is {text!r}: name at least one partition of each topic, as {{"orders": [0, 2]}}.')
    return assigned


def _bound(options: Mapping[str, str], names: tuple[str, ...], default: int) -> Bound:
    given = [name for name in names if name.lower() in options]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} contradict each other. Keep one of them.")
    if not given:
        return Bound(names[0], default)
    name, text = given[0], options[given[0].lower()].strip()
    if name == names[1]:
        return Bound(name, number(name, text), timestamps=True)
    if name == names[0] and text.lower() in _NAMED:
        return Bound(name, _NAMED[text.lower()])
    return Bound(name, by_partition=_by_partition(name, text), timestamps=name == names[2])


def _by_partition(name: str, text: str) -> ByPartition:
    try:
        return msgspec.json.decode(text, type=dict[str, dict[int, int]])
    except msgspec.DecodeError as error:
        named = " earliest, latest or" if name.endswith("Offsets") else ""
        raise ConfigError(
            f"{name} is {text!r}, which cannot be read ({error}). "
            f'Write{named} JSON by topic and partition: {{"orders": {{"0": 23, "1": 42}}}}.'
        ) from None


def _refuse_impossible(options: ReadOptions, streaming: bool | None) -> None:
    """Raise ConfigError for bounds that no topic can have."""
    least, most = options.offsets_per_trigger_min, options.offsets_per_trigger_max
    if least is not None and most is not None and least > most:
        raise ConfigError(f"minOffsetsPerTrigger is {least}, more than maxOffsetsPerTrigger, {most}. Give less.")
    for bound in (options.start, options.end):
        numbers = [bound.number]
        if bound.by_partition is not None:
            numbers = [number for offsets in bound.by_partition.values() for number in offsets.values()]
        if any(number < (0 if bound.timestamps else EARLIEST) for number in numbers):
            raise ConfigError(f"{bound.option}: offsets are -2 (earliest), -1 (latest) or from 0 on; times from 0 on.")
        if bound.by_partition is not None:
            _require_same_topics(bound.option, bound.by_partition, options)
        if bound.timestamps:
            continue
        if bound is options.end and EARLIEST in numbers:
            raise ConfigError(f"{bound.option}: a range cannot end at the earliest offset. Give latest or an offset.")
        if bound is options.start and LATEST in numbers and streaming is False:
            raise ConfigError(f"{bound.option}: a batch cannot begin at the latest offset: it would have no records.")


def _require_same_topics(option: str, named: ByPartition, options: ReadOptions) -> None:
    """Raise ConfigError if *option* names other topics than are read, as far as these are known."""
    if options.pattern is not None:
        if other := sorted(name for name in named if not options.matches(name)):
            raise ConfigError(
                f"{option} names the topic {other[0]}, which subscribePattern {options.pattern!r} does not match. Name "
                f"those that it matches."
            )
    elif set(named) != set(options.topics):
        way = "subscribe" if options.assigned is None else "assign"
        raise ConfigError(
            f"{option} names the topics {', '.join(sorted(named))}, but {way} {', '.join(sorted(options.topics))}. "
            f"Name the same ones."
        )


def flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    """The option *name* of *options*, whose names are in lower case."""
    text = options.get(name.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{name} is {text!r}: write true or false.")
    return text == "true"


def count(options: Mapping[str, str], name: str) -> int | None:
    """The option *name*, from 1 on; None if it is not given."""
    if name.lower() not in options:
        return None
    given = number(name, options[name.lower()])
    if given < 1:
        raise ConfigError(f"{name} is {given}: it must be at least 1.")
    return given


def number(name: str, text: str) -> int:
    """The number that *text*, the option *name*, stands for."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: write a whole number.") from None


@dataclass(frozen=True)
class StateOptions(ClientOptions):
    pipeline: str
    """The pipeline's name; empty: `url` is given."""
    url: str
    """The URL of an exported savepoint."""
    operator: str
    checkpoint: int | None
    moment: datetime | None
    """The newest checkpoint that was complete then. Without both, the newest."""
    key: str | None
    key_schema: Any
    """The schema, as `pipeline.shape.describe` gives it; None: not given."""
    types: str
    """`module:attribute` of a pipeline with the types; empty: none."""
    params: Mapping[str, str]
    in_json: bool
    partitions_min: int


def is_of_state(given: Mapping[str, str]) -> bool:
    """Whether these are the options of a read of state."""
    return any(name.lower() == STATE for name in given)


@dataclass(frozen=True)
class HistoryOptions(ClientOptions):
    pipeline: str


def is_of_history(given: Mapping[str, str]) -> bool:
    """Whether these are the options of a read of the checkpoints."""
    return any(name.lower() == HISTORY for name in given)


def parse_history_options(given: Mapping[str, str]) -> HistoryOptions:
    """Check and parse. Names may be written in any case, as always in Spark."""
    options = {name.lower(): value for name, value in given.items()}
    client = client_settings_in(options)
    _refuse_unknown(options, (HISTORY,), " for a read of history")
    pipeline = options[HISTORY].strip()
    if problem := name_problem(pipeline):
        raise ConfigError(f"history: the name of a pipeline, {problem}.")
    _require_servers(client)
    parsed = HistoryOptions(pipeline, client_settings=client)
    parsed.client()
    return parsed


def _require_servers(client: Mapping[str, str]) -> None:
    if "bootstrap.servers" not in client:
        raise ConfigError("kafka.bootstrap.servers is not set. Name at least one broker, as host:port.")


def parse_state_options(given: Mapping[str, str]) -> StateOptions:
    """Check and parse. Names may be written in any case, as always in Spark."""
    options = {name.lower(): value for name, value in given.items()}
    client = client_settings_in(options)
    where = options[STATE].strip()
    exported = is_url(where) or where.startswith("/")
    if AFTER in options:
        raise ConfigError(
            f"{AFTER} is for topics: a state is that of one checkpoint, which checkpoint or asOf names. Leave it out; "
            f"what has changed since then are the records that the pipeline has written: read them by pipeline and "
            f"{AFTER}, or compare two reads of state."
        )
    _refuse_unknown(options, STATE_OPTIONS, " for a read of state")
    if exported:
        misplaced = [name for name in IN_TOPIC_ONLY if name.lower() in options]
        misplaced += [name for name in options if name.startswith(KAFKA)]
        if misplaced:
            raise ConfigError(
                f"{', '.join(misplaced)} is not for an exported savepoint, which is one checkpoint in files. Leave it "
                f"out, or give the name of a pipeline instead of the URL."
            )
        storage_url(where, STATE)
    if not exported and (problem := name_problem(where)):
        raise ConfigError(
            f"state: the name of a pipeline, {problem}. Give the name, or the URL of an exported savepoint; the option "
            f"types names the module."
        )
    if not exported:
        _require_servers(client)
    if "params" in options and "types" not in options:
        raise ConfigError("params is for a function that types names. Leave it out, or give types.")
    checkpoint, moment = _checkpoint(options)
    parsed = StateOptions(
        pipeline="" if exported else where,
        url=where if exported else "",
        operator=options.get("operator", ""),
        checkpoint=checkpoint,
        moment=moment,
        key=options.get("key"),
        key_schema=_key_schema(options["keytype"]) if "keytype" in options else None,
        types=options.get("types", ""),
        params=_params(options.get("params", "{}")),
        in_json=flag(options, "json", False),
        partitions_min=count(options, "minPartitions") or 1,
        client_settings=client,
    )
    if not exported:
        parsed.client()
    return parsed


def _key_schema(text: str) -> Any:
    """A type of keys: a word, or the words of a tuple.

    >>> _key_schema("str"), _key_schema("str, int")
    ('str', {'tuple': ['str', 'int']})
    """
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if word not in KEY_TYPES]:
        raise ConfigError(
            f"keyType is {text!r}: {wrong[0]!r} is no type of a key. Write one of {', '.join(KEY_TYPES)}; for a tuple "
            f"several, as 'str, int'."
        )
    return words[0] if len(words) == 1 else {"tuple": words}


def _mode(text: str) -> Mode:
    try:
        return Mode(text.strip().upper())
    except ValueError:
        raise ConfigError(f"mode is {text!r}: write one of {', '.join(mode.value for mode in Mode)}.") from None


def _params(text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(f'params is {text!r}, which is not read ({error}). Write JSON: {{"name": "v2"}}.') from None

"""The options of `df.write` and `df.writeStream`, and the columns, checked.

With `sink=kafka`, the default, rows go to topics, else to the named store; see `target`. Invariants: nothing is opened;
an unknown option is an error that names the known ones; a secret is a reference (`env:NAME`, `file:/path`), because
Spark shows options in its plans and event logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import SETTING, partitioner
from exactlyonce.engines.spark.client_options import KAFKA, ClientOptions, client_settings_in
from exactlyonce.engines.spark.sink.target import StoreTarget, arguments_of, parse_target
from exactlyonce.pipeline.durations import duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import name_problem, topic_problem

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

OPTIONS = ("sinkId", "sink", "adoptQuery", "acceptLoss", "writeId")
OF_KAFKA = ("topic", "partitioner", "transactionTimeout", "acceptNewOutput")
TO_KAFKA = "kafka"
OF_STORES = ("storeTimeout",)
BATCH_ONLY = ("writeId",)
REPEATABLE = "none"
"""The `writeId` of a write that counts anew each time it runs."""
WRITE_ID_BYTES_MAX = 128
"""A decision, one record, holds the last thousand ids."""
TIMEOUT_DEFAULT_MS = 15 * 60_000
"""The time from a job's first row to its decision, for which a dead query holds readers back: the default cap of
brokers, even where a cluster's cap is higher."""
TIMEOUT_MIN_MS = 10_000
STORE_TIMEOUT_MS = CheckpointSettings().store_timeout_ms
_SPARKS_OWN = ("checkpointlocation", "path", "queryname")
"""Spark's own options, which it passes on."""
_HEADERS = "array<struct<key:string,value:binary>>"
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": (_HEADERS,),
}
"""The columns of Spark's own Kafka sink, with their types. Other columns are ignored, as there."""


@dataclass(frozen=True, kw_only=True)
class SinkOptions(ClientOptions):
    sink_id: str
    topic: str
    """The topic of every row; empty: each row names its own."""
    columns: Mapping[str, int]
    """The place of each existing column of `COLUMNS`."""
    adopt_query: str
    accept_loss: int | None
    accept_new_output: str
    """A topic to write to though it was created again since the last job; empty: none."""
    write_id: str
    """Empty: none was given."""
    transaction_timeout_ms: int | None
    """None: see `timeout_within`."""
    partitioner: str | None = None
    """The partitioner by which keys are distributed; None: none was chosen."""
    target: StoreTarget | None = None
    """The store for the rows; None: Kafka."""
    store_timeout_ms: int = STORE_TIMEOUT_MS

    def timeout_within(self, cap_ms: int) -> int:
        """The timeout of a transaction; *cap_ms* is the longest that the broker allows."""
        if self.transaction_timeout_ms is None:
            return min(TIMEOUT_DEFAULT_MS, cap_ms)
        if self.transaction_timeout_ms > cap_ms:
            raise ConfigError(
                f"transactionTimeout is {self.transaction_timeout_ms // 1000} s, but the broker allows "
                f"{cap_ms // 1000} s at most, its transaction.max.timeout.ms: give less, or raise that."
            )
        return self.transaction_timeout_ms


def parse_sink_options(given: Mapping[str, str], schema: StructType, *, streaming: bool) -> SinkOptions:
    """Check and parse. Names may be written in any case, as always in Spark, and with or without underscores."""
    options = {_normal(name): value for name, value in given.items()}
    store = options.get("sink", TO_KAFKA).lower()
    known: Mapping[str, object] = {} if store == TO_KAFKA else arguments_of(store)
    arguments = {name: options[_normal(name)] for name in known if _normal(name) in options}
    _refuse_unknown(options, store, known, streaming)
    sink_id = options.get("sinkid", "")
    if problem := name_problem(sink_id):
        raise ConfigError(
            f"sinkId {problem}. It is the name under which the cluster remembers what this sink has written: give "
            f'every sink one of its own, and never change it, as .option("sinkId", "orders-to-kafka").'
        )
    client_settings = client_settings_in(options)
    if secrets := ClientConfig(client_settings).secrets_written_out:
        raise ConfigError(
            f"kafka.{secrets[0]} is written out. Spark shows options in plans and event logs: give a reference "
            f"instead, env:NAME or file:/path, which is looked up on the driver and on every executor."
        )
    topic = options.get("topic", "")
    if topic and (problem := topic_problem(topic)):
        raise ConfigError(f"{problem[0].upper()}{problem[1:]}.")
    target = None if store == TO_KAFKA else parse_target(store, arguments, schema, sink_id)
    return SinkOptions(
        sink_id=sink_id,
        topic=topic,
        columns=_columns(schema, topic) if target is None else {},
        adopt_query=options.get("adoptquery", ""),
        accept_loss=_checkpoint(options.get("acceptloss")),
        accept_new_output=options.get("acceptnewoutput", ""),
        write_id=_write_id(options.get("writeid", "")),
        transaction_timeout_ms=_timeout_ms(options.get("transactiontimeout")),
        client_settings=client_settings,
        partitioner=_partitioner(options.get(SETTING, client_settings.get(SETTING))),
        target=target,
        store_timeout_ms=duration_ms(options.get("storetimeout", f"{STORE_TIMEOUT_MS}ms"), "storeTimeout"),
    )


def _normal(name: str) -> str:
    """The normal form of an option's name; a setting of librdkafka keeps its underscores."""
    lower = name.lower()
    return lower if lower.startswith(KAFKA) else lower.replace("_", "")


def _refuse_unknown(options: Mapping[str, str], store: str, arguments: Iterable[str], streaming: bool) -> None:
    names = (*OPTIONS, *(OF_KAFKA if store == TO_KAFKA else (*OF_STORES, *arguments)))
    offered = [name for name in names if not (streaming and name in BATCH_ONLY)]
    known = {*map(_normal, offered), *_SPARKS_OWN}
    unknown = [name for name in options if name not in known and not name.startswith(KAFKA)]
    if unknown:
        kind = f"{'stream' if streaming else 'batch'}{'' if store == TO_KAFKA else f' with sink={store}'}"
        raise ConfigError(
            f"There is no option {', '.join(map(repr, sorted(unknown)))} for a {kind}. "
            f"Options are: {', '.join(offered)}, and kafka.NAME for any setting of librdkafka, as "
            f"kafka.bootstrap.servers."
        )


def _columns(schema: StructType, topic: str) -> dict[str, int]:
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name, allowed in COLUMNS.items():
        if name in types and types[name] not in allowed:
            raise ConfigError(f"Column {name!r} is of type {types[name]}; it must be {' or '.join(allowed)}. Cast it.")
    if "value" not in types:
        raise ConfigError(f"There is no column 'value' among {', '.join(types)}. Name what is to be written so.")
    if not topic and "topic" not in types:
        raise ConfigError("It is not said where to write to: set the option topic, or add a column 'topic'.")
    places = {field.name: place for place, field in enumerate(schema.fields)}
    return {name: places[name] for name in COLUMNS if name in types and not (topic and name == "topic")}


def _checkpoint(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"acceptLoss is {text!r}: write the number of the checkpoint that the halt has named.")
    return int(text)


def _write_id(text: str) -> str:
    if len(text.encode()) > WRITE_ID_BYTES_MAX:
        raise ConfigError(f"writeId has {len(text.encode())} bytes: it must have {WRITE_ID_BYTES_MAX} at most.")
    return text


def _partitioner(name: str | None) -> str | None:
    if name is not None:
        partitioner(name)
    return name


def _timeout_ms(text: str | None) -> int | None:
    if text is None:
        return None
    timeout_ms = duration_ms(text, "transactionTimeout")
    if timeout_ms < TIMEOUT_MIN_MS:
        raise ConfigError(f"transactionTimeout is {text!r}: it must be {TIMEOUT_MIN_MS // 1000} s at least.")
    return timeout_ms

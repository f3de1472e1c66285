"""The options of `df.write` and `df.writeStream`, and the columns, checked.

With `sink=kafka`, the default, rows go to topics; else to the store that it names, see `target`.

Invariants: nothing is opened; an option that is not known is an error that names what there is; a secret is a reference
(`env:NAME`, `file:/path`), because Spark shows options to whoever may see its plans and event logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.spark.sink.target import ARGUMENTS, StoreTarget, parse_target
from exactlyonce.engines.spark.sink.target import KAFKA as TO_KAFKA
from exactlyonce.pipeline.durations import duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import name_problem, topic_problem

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

KAFKA = "kafka."
OPTIONS = ("sinkId", "sink", "adoptQuery", "acceptLoss", "writeId")
OF_KAFKA = ("topic", "transactionTimeout")
OF_STORES = ("storeTimeout",)
BATCH_ONLY = ("writeId",)
WRITE_ID_BYTES_MAX = 128
"""A decision holds the last thousand of them, and is one record."""
TIMEOUT_DEFAULT_MS = 15 * 60_000
"""What a job has from its first row to its decision, and what a dead query's open transactions hold readers back for,
unless the broker allows less: as long as brokers allow by default. The cap of a cluster that was raised, for jobs that
take hours, is no reason to hold readers back for hours."""
TIMEOUT_MIN_MS = 10_000
STORE_TIMEOUT_MS = CheckpointSettings().store_timeout_ms
_SPARKS_OWN = ("checkpointlocation", "path", "queryname")
"""What Spark passes on though it is not meant for us."""
_HEADERS = "array<struct<key:string,value:binary>>"
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": (_HEADERS,),
}
"""The columns of Spark's own Kafka sink, with the types that each may have. Others are left out, as there."""


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """A write, whole."""

    sink_id: str
    topic: str
    """Where every row goes; empty: each row says it."""
    columns: Mapping[str, int]
    """Where each column of `COLUMNS` is, for those that there are."""
    adopt_query: str
    accept_loss: int | None
    write_id: str
    transaction_timeout_ms: int | None
    """None: see `timeout_within`."""
    client_settings: Mapping[str, str] = field(repr=False)
    target: StoreTarget | None = None
    """The store that rows go to; None: Kafka."""
    store_timeout_ms: int = STORE_TIMEOUT_MS
    """For how long a store that does not answer is waited for."""

    def client(self) -> ClientConfig:
        """How to reach the cluster; made where it is used, so that no looked-up secret travels."""
        return ClientConfig(self.client_settings)

    def timeout_within(self, cap_ms: int) -> int:
        """How long the broker keeps a transaction open for; *cap_ms*: the longest that it allows."""
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
    arguments = _arguments(store, options)
    _refuse_unknown(options, store, streaming)
    sink_id = options.get("sinkid", "")
    if problem := name_problem(sink_id):
        raise ConfigError(
            f"sinkId {problem}. It is the name under which the cluster remembers what this sink has written: give "
            f'every sink one of its own, and never change it, as .option("sinkId", "orders-to-kafka").'
        )
    client_settings = {name[len(KAFKA) :]: value for name, value in options.items() if name.startswith(KAFKA)}
    _refuse_secrets(ClientConfig(client_settings))
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
        write_id=_write_id(options.get("writeid", "")),
        transaction_timeout_ms=_timeout_ms(options.get("transactiontimeout")),
        client_settings=client_settings,
        target=target,
        store_timeout_ms=duration_ms(options.get("storetimeout", f"{STORE_TIMEOUT_MS}ms"), "storeTimeout"),
    )


def _normal(name: str) -> str:
    """The name of an option, however it is written; a setting of librdkafka keeps its underscores."""
    lower = name.lower()
    return lower if lower.startswith(KAFKA) else lower.replace("_", "")


def _arguments(store: str, options: Mapping[str, str]) -> dict[str, str]:
    """Of the description of *store*, those that *options* give."""
    if store != TO_KAFKA and store not in ARGUMENTS:
        raise ConfigError(f"The option sink is {store!r}: write one of {', '.join((TO_KAFKA, *ARGUMENTS))}.")
    names = ARGUMENTS.get(store, {})
    return {name: options[_normal(name)] for name in names if _normal(name) in options}


def _refuse_unknown(options: Mapping[str, str], store: str, streaming: bool) -> None:
    names = (*OPTIONS, *(OF_KAFKA if store == TO_KAFKA else (*OF_STORES, *ARGUMENTS[store])))
    offered = [name for name in names if not (streaming and name in BATCH_ONLY)]
    known = {*map(_normal, offered), *_SPARKS_OWN}
    unknown = [name for name in options if name not in known and not name.startswith(KAFKA)]
    if unknown:
        what = f"{'stream' if streaming else 'batch'}{'' if store == TO_KAFKA else f' with sink={store}'}"
        raise ConfigError(
            f"There is no option {', '.join(map(repr, sorted(unknown)))} for a {what}. "
            f"Options are: {', '.join(offered)}, and kafka.NAME for any setting of librdkafka, as "
            f"kafka.bootstrap.servers."
        )


def _refuse_secrets(config: ClientConfig) -> None:
    if config.secrets_written_out:
        name = config.secrets_written_out[0]
        raise ConfigError(
            f"kafka.{name} is written out. Spark shows options in plans and event logs: give a reference instead, "
            f"env:NAME or file:/path, which is looked up on the driver and on every executor."
        )


def _columns(schema: StructType, topic: str) -> dict[str, int]:
    found = {each.name: (place, each.dataType.simpleString()) for place, each in enumerate(schema.fields)}
    for name, types in COLUMNS.items():
        if name in found and found[name][1] not in types:
            raise ConfigError(f"Column {name!r} is of type {found[name][1]}; it must be {' or '.join(types)}. Cast it.")
    if "value" not in found:
        raise ConfigError(f"There is no column 'value' among {', '.join(found)}. Name what is to be written so.")
    if not topic and "topic" not in found:
        raise ConfigError("It is not said where to write to: set the option topic, or add a column 'topic'.")
    return {name: found[name][0] for name in COLUMNS if name in found and not (topic and name == "topic")}


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


def _timeout_ms(text: str | None) -> int | None:
    if text is None:
        return None
    timeout_ms = duration_ms(text, "transactionTimeout")
    if timeout_ms < TIMEOUT_MIN_MS:
        raise ConfigError(f"transactionTimeout is {text!r}: it must be {TIMEOUT_MIN_MS // 1000} s at least.")
    return timeout_ms

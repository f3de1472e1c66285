"""The options of `exactlyonce run` and of `Pipeline.run`, each declared once, and checked before anything is started.

Importing this imports no client: the parser of the command line follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec

from exactlyonce.checkpoint.settings import (
    PARTITIONS,
    PARTITIONS_MIN,
    CheckpointSettings,
    RestartStrategy,
    restart_strategy,
)
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.names import setting
from exactlyonce.pipeline.positions import UNTIL
from exactlyonce.pipeline.settings import (
    CHOICE,
    COUNT,
    DURATION,
    FLAG,
    OTHER,
    SHARE,
    SIZE,
    TEXT,
    Declared,
    Setting,
    check_bounds,
    declared,
)

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import RecordPlace
    from exactlyonce.connectors.kafka.client_config import ClientConfig

HASHMAP, ROCKSDB = "hashmap", "rocksdb"
CHUNK_RECORDS = 5_000_000
"""The records of a bounded checkpoint of few units: minutes of work, seconds of open transactions."""


def listening_at(text: str) -> tuple[str, int]:
    """The host and the port of a setting; ConfigError for another form.

    >>> listening_at("127.0.0.1:9100"), listening_at("[::1]:9100")
    (('127.0.0.1', 9100), ('::1', 9100))
    """
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) <= 65_535:
        raise ConfigError(
            f"{text!r} is no address: write HOST:PORT, as 127.0.0.1:9100; 0.0.0.0:9100 is for any network."
        )
    return host.strip("[]"), int(port)


def collector_at(text: str) -> str:
    """The URL of a collector of traces; ConfigError for another form, and for one with a login.

    >>> collector_at("http://127.0.0.1:4318/")
    'http://127.0.0.1:4318'
    """
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or "@" in url.netloc:
        raise ConfigError(
            "A collector of traces is given by its URL, as http://127.0.0.1:4318, and without a login: that is in the "
            "variable OTEL_EXPORTER_OTLP_HEADERS."
        )
    return text.rstrip("/")


class StateSettings(msgspec.Struct, frozen=True):
    """The settings of a file's table [state]."""

    backend: Annotated[str, Setting(
        CHOICE, "hashmap: all in memory; rocksdb: a part of it, the rest in local files", choices=(HASHMAP, ROCKSDB),
        keyword="state_backend", flink="`state.backend.type`",
    )] = HASHMAP  # fmt: skip
    memory_bytes: Annotated[int, Setting(
        SIZE, "what rocksdb lets a worker take, with its state", minimum=1 << 20, keyword="state_memory",
        flink="`taskmanager.memory.managed.size`, of a whole task manager",
    )] = 512 << 20  # fmt: skip
    folder: Annotated[str, Setting(
        TEXT, "where rocksdb keeps local files", default="~/.cache/exactlyonce/state", keyword="state_folder",
        metavar="PATH",
        flink="`state.backend.rocksdb.localdir`; local files are always taken again, as with "
        "`execution.state-recovery.from-local` (before Flink 2 `state.backend.local-recovery`)",
    )] = ""  # fmt: skip
    contradicting: tuple[str, ...] = ()
    """The names of settings for `rocksdb` that were given for another backend."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def path(self) -> Path:
        """The folder of the local files."""
        if self.folder:
            return Path(self.folder).expanduser()
        from exactlyonce.connectors.embedded.jars import cache_dir  # with all that a download needs

        return cache_dir() / "state"

    def check(self) -> None:
        """Raise `ConfigError` if the backend cannot be used here, or contradicts other settings."""
        if self.contradicting:
            backend, shown = setting("state_backend"), " and ".join(self.contradicting)
            raise ConfigError(
                f"{shown}: that is for {ROCKSDB}, and {backend} is {self.backend}, which keeps all state in memory and "
                f"knows no bound. Set {backend} to {ROCKSDB}, or leave {shown} out; for a run whose settings file is "
                f"shared with others, --state-backend {self.backend} says that it is meant."
            )
        if self.backend != ROCKSDB:
            return
        with needing(ROCKSDB, "rocksdict", 'state_backend "rocksdb"'):
            import rocksdict  # noqa: F401 - only to see whether it is there
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The folder of the local files of state, {self.path}, cannot be made: {error.strerror}. Name another "
                f"one with {setting('state_folder')}."
            ) from None


START_TIMEOUT_MS, START_TIMEOUT_SUPERVISED_MS = 15_000, 600_000
"""A silent connection is given up after eight seconds, so that another one has its turn in either."""
BOUNDED_CHECKPOINT = ("num_retained", "incremental", "store_timeout_ms", "transaction_timeout_ms", "storage")
BOUNDED_RUN = ("checkpoint_partitions", "accept_loss", "accept_new_output", "skip", "repair")
"""The fields of `CheckpointSettings` and `RunOptions` that bounded work has, too, beside parallelism and savepoints."""


def _declare(default: Any, declaration: Setting) -> Any:
    return field(default=default, metadata={"setting": declaration})


@dataclass(frozen=True)
class Restoration:
    """The savepoint that a run begins from."""

    source: str = _declare("", Setting(
        OTHER, "begin from savepoint N of the pipeline, or from one that was exported to URL; once, if it is repeated",
        key="from_savepoint", default="none", metavar="N|URL", type="str | int",
        flink="`execution.state-recovery.path`, or `flink run --fromSavepoint`",
    ))  # fmt: skip
    """The number of a savepoint in the pipeline's topic, or the URL of an exported savepoint."""
    mapping: Mapping[str, str] = field(default_factory=dict, metadata={"setting": Setting(
        OTHER, "operator, source or loop OLD of the savepoint is NEW now, any number of them", key="map",
        default="none", metavar="OLD=NEW", type="Mapping[str, str]",
    )})  # fmt: skip
    """The present id of an operator or source, by its id in the savepoint."""
    allow_dropped: bool = _declare(False, Setting(
        FLAG, "leave behind state and sources that the pipeline does not have any more", key="allow_dropped_state",
        flink="`execution.state-recovery.ignore-unclaimed-state`, or `flink run --allowNonRestoredState`",
    ))  # fmt: skip
    rewind: bool = _declare(False, Setting(
        FLAG, "go back to savepoint N, though there are newer checkpoints: output since then is written again",
        in_file=False,
    ))  # fmt: skip
    """In a file it would stand at every start, and write output again at some of them."""

    @property
    def number(self) -> int | None:
        """The number in the topic; None: it was exported."""
        return int(self.source) if self.source.isdecimal() else None


def _checked(text: str) -> str:
    listening_at(text)
    return text


@dataclass(frozen=True)
class RunOptions:
    """One run. Times are in milliseconds."""

    client: ClientConfig
    """How to reach the cluster; librdkafka's settings are passed through."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    state: StateSettings = field(default_factory=StateSettings)
    parallelism: int = _declare(1, Setting(COUNT, "worker processes", minimum=1, flink="`parallelism.default`"))
    until: str = _declare("running", Setting(
        CHOICE, "running: until it is stopped; latest: process what is there, take a last checkpoint and end",
        choices=UNTIL.forms, reader=lambda text: str(UNTIL.read(text)),
    ))  # fmt: skip
    drain: bool = _declare(False, Setting(
        FLAG, "with until latest: at the end, close all windows; later records of them are late then",
        flink="`flink stop --drain`",
    ))  # fmt: skip
    max_late: float = _declare(0.5, Setting(
        SHARE, "stop before a checkpoint in which an operator of event time leaves out more than this share of its "
        "latest records, since they came late; 1: leave out any number",
    ))  # fmt: skip
    """See `checkpoint.leader_config.LateRecords`."""
    standby: bool = _declare(False, Setting(
        FLAG, "wait until no other run of the pipeline leads, then take over (default: take over at once)",
        flink="`high-availability.type`, with a standby JobManager",
    ))  # fmt: skip
    broker_timeout_ms: int | None = _declare(None, Setting(
        DURATION, "how long a start waits for brokers and registries that do not answer",
        default="10m under a supervisor, else 15s",
    ))  # fmt: skip
    """From the start of the process until its first incarnation has recovered; later it waits as *restart* says."""
    ui: str = _declare("", Setting(
        TEXT, "show the run to a browser there, with /live and /ready for probes", default="none",
        metavar="HOST:PORT", reader=_checked, flink="`rest.bind-port`",
    ))  # fmt: skip
    metrics: str = _declare("", Setting(
        TEXT, "answer there, over HTTP: /metrics for Prometheus, /live and /ready for probes", default="none",
        metavar="HOST:PORT", reader=_checked, flink="`metrics.reporter.prom.port`",
    ))  # fmt: skip
    serve: str = _declare("", Setting(
        TEXT, "answer there, over HTTP: /state/OPERATOR/KEY, the state of a key at the newest checkpoint",
        default="none", metavar="HOST:PORT", reader=_checked,
    ))  # fmt: skip
    serve_token: str = _declare("", Setting(
        TEXT, "the place of the token that requests for state have, env:NAME or file:/path", default="none",
        metavar="REF",
    ))  # fmt: skip
    traces: str = _declare("", Setting(
        TEXT, "send a span for each checkpoint and each restart to the OpenTelemetry collector there, by OTLP over "
        "HTTP", default="none", metavar="URL", reader=collector_at, flink="`traces.reporters`",
    ))  # fmt: skip
    log_format: str = _declare("auto", Setting(
        CHOICE, "the lines on stderr: text, json with the time in ISO 8601, or auto: text in a terminal, else json",
        choices=("auto", "text", "json"),
    ))  # fmt: skip
    checkpoint_partitions: int = _declare(PARTITIONS, Setting(
        COUNT, "of their topic, when it is created, one of them for decisions", minimum=PARTITIONS_MIN,
    ))  # fmt: skip
    inline: bool = _declare(False, Setting(FLAG, "all in one process, for a debugger", in_file=False))
    accept_loss: int | None = _declare(None, Setting(
        COUNT, "give up the output of checkpoint N that a halt has named as lost, and go on", in_file=False,
    ))  # fmt: skip
    accept_new_output: tuple[str, ...] = _declare((), Setting(
        OTHER, "go on into a topic that was created again since the last checkpoint, as a halt has said: records that "
        "it lost stay lost; any number of topics", default="none", in_file=False, metavar="TOPIC",
        type="str | Sequence[str]",
    ))  # fmt: skip
    skip: tuple[RecordPlace, ...] = _declare((), Setting(
        OTHER, "leave out a record of the input that an error has named, any number of them; checkpoints note it",
        default="none", in_file=False, metavar="TOPIC:PARTITION:OFFSET", type="str | Sequence[str]",
    ))  # fmt: skip
    repair: str = _declare("local", Setting(
        CHOICE, "output that a decided checkpoint has lost, and that cannot be copied, is computed again from the "
        "input: in this process (local), on Spark, or not at all (halt)", choices=("local", "spark", "halt"),
    ))  # fmt: skip
    allow_dropped_fields: bool = _declare(False, Setting(
        FLAG, "leave behind fields of states that the code does not have, whatever they hold; also without a savepoint",
        in_file=False,
    ))  # fmt: skip
    restart: Mapping[str, int | str] = field(default_factory=lambda: {"strategy": "exponential_delay"})
    restoration: Restoration | None = None
    """The savepoint to begin from; None: the run goes on from its newest checkpoint."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.inline and self.parallelism != 1:
            raise ConfigError("inline (--inline) runs everything in one process: it goes with parallelism 1 only.")
        if self.drain and self.until != "latest":
            raise ConfigError(
                f"{setting('drain')} closes all windows once all is read: it goes with {setting('until')} latest only. "
                f"Without it they stay open, and the next run goes on with them."
            )
        self.restart_strategy()

    def start_timeout_ms(self, *, is_supervised: bool) -> int:
        """`broker_timeout_ms`, or its default. A supervisor starts the run when the machine comes up, as it starts the
        broker, and may give up after a few failures; a person sees a wrong address sooner."""
        if self.broker_timeout_ms is not None:
            return self.broker_timeout_ms
        return START_TIMEOUT_SUPERVISED_MS if is_supervised else START_TIMEOUT_MS

    def restart_strategy(self) -> RestartStrategy:
        options = dict(self.restart)
        name = str(options.pop("strategy", "exponential_delay"))
        return restart_strategy(name, **{key: int(value) for key, value in options.items()})


def settings_of_bounded_work() -> list[Declared]:
    """The settings of a run that bounded work has, too."""
    checkpoint, run = declared(CheckpointSettings), declared(RunOptions)
    settings = [run[name] for name in ("parallelism", *BOUNDED_RUN, "allow_dropped_fields")]
    return [*settings, *(checkpoint[name] for name in BOUNDED_CHECKPOINT), *declared(Restoration).values()]

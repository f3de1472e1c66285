"""Settings as people write them (command line, keyword arguments, a TOML file, the environment) made into `RunOptions`.

What is given directly wins over the file, the file over the environment. A key that does not exist is an error that
lists those that do.

    [run]           parallelism, until, standby, repair, checkpoint_partitions, from_savepoint, map, allow_dropped_state
    [checkpoint]    mode, unaligned, aligned_timeout, interval, timeout, deploy_timeout, min_pause, max_concurrent,
                    tolerable_failed, num_retained, incremental, retention, restart_budget, store_timeout,
                    stop_timeout, transaction_timeout, storage
    [state]         backend, memory, folder
    [restart]       strategy, and its options: attempts, delay, failures, window, initial, max
    [kafka]         any setting of librdkafka: "security.protocol" = "SASL_SSL"

Durations are written "500ms", "1.5s", "10m" or "1h", sizes "512mb" or "2gb".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exactlyonce.checkpoint.records.manifest import RecordPlace
from exactlyonce.checkpoint.records.storage_url import storage_setting, storage_url
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.client_config import ClientConfig, by_name
from exactlyonce.engines.backends import HASHMAP, ROCKSDB, StateSettings
from exactlyonce.engines.options import Restoration, RunOptions
from exactlyonce.pipeline.durations import duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import setting
from exactlyonce.pipeline.sizes import byte_count

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BOOTSTRAP_VARIABLE = "EXACTLYONCE_BOOTSTRAP_SERVERS"

_RUN = ("parallelism", "until", "standby", "repair", "checkpoint_partitions")
_DURATIONS = (
    *("aligned_timeout", "interval", "timeout", "deploy_timeout", "min_pause"),
    *("restart_budget", "store_timeout", "stop_timeout", "transaction_timeout"),
)
_WORDS = ("mode", "retention", "storage")
_FLAGS = ("unaligned", "incremental")
_COUNTS = ("max_concurrent", "tolerable_failed", "num_retained")
_STATE = ("backend", "memory", "folder")
_RESTART_DURATIONS = ("delay", "window", "initial", "max")
_RESTART_COUNTS = ("attempts", "failures")


def _keyword(name: str) -> str:
    """What `Pipeline.run` and, with dashes, the command call a key of `[checkpoint]`."""
    return f"checkpoint_{name}" if name in ("interval", "timeout", "storage") else name


_SAVEPOINT = ("from_savepoint", "map", "allow_dropped_state")
RESTORING = (*_SAVEPOINT, "rewind")
"""The last is in no file: it would stand there at every start, and write output again at some of them."""
_OF_RUN = ("log_level", "on_event")
"""Options that `engines.local.run.run` takes itself; an error lists them with the others."""
_DIRECT = {
    "bootstrap_servers",
    "config",
    "kafka",
    "inline",
    "accept_loss",
    "allow_dropped_fields",
    "skip",
    "restart",
    *RESTORING,
    *_RUN,
    *(f"state_{name}" for name in _STATE),
    *(_keyword(name) for name in (*_WORDS, *_FLAGS, *_DURATIONS, *_COUNTS)),
}


def client_from(options: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> ClientConfig:
    """How to reach the cluster: `bootstrap_servers` and `kafka` of *options*, the file's `[kafka]`, the environment."""
    given = options.get("kafka") or {}
    if not isinstance(given, Mapping):
        raise ConfigError('kafka has to be a dict of librdkafka\'s settings, as {"security.protocol": "SASL_SSL"}.')
    servers = options.get("bootstrap_servers")
    direct = by_name([*given.items(), *([("bootstrap.servers", servers)] if servers else [])])
    settings = {**by_name((file or {}).get("kafka", {}).items()), **direct}
    servers = settings.get("bootstrap.servers") or os.environ.get(BOOTSTRAP_VARIABLE)
    if not servers:
        raise ConfigError(
            f"No Kafka cluster is named. Give --bootstrap-servers HOST:PORT, in Python bootstrap_servers=, or set "
            f"{BOOTSTRAP_VARIABLE}, or start one here with `exactlyonce broker start`."
        )
    return ClientConfig({**settings, "bootstrap.servers": servers})


def read_file(path: str | Path | None) -> dict[str, Any]:
    """The tables of a TOML file, checked for keys that do not exist."""
    if path is None:
        return {}
    try:
        file = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"The configuration file {path} is no UTF-8, at byte {error.start}: save it so.") from None
    except RecursionError:
        raise ConfigError(f"The configuration file {path} has brackets within brackets, too many to be read.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {error}.") from None
    known = {
        "run": (*_RUN, *_SAVEPOINT),
        "checkpoint": (*_WORDS, *_FLAGS, *_DURATIONS, *_COUNTS),
        "state": _STATE,
        "restart": ("strategy", *_RESTART_DURATIONS, *_RESTART_COUNTS),
    }
    for table, content in file.items():
        if table not in (*known, "kafka") or not isinstance(content, dict):
            raise ConfigError(
                f"{path}: there is no table [{table}]. Tables are: [run], [checkpoint], [state], [restart], [kafka]."
            )
        for key in content:
            if table != "kafka" and key not in known[table]:
                raise ConfigError(f"{path}: [{table}] has no key {key!r}. It has: {', '.join(known[table])}.")
    return file


def options_from(options: Mapping[str, Any]) -> RunOptions:
    """`RunOptions` from keyword arguments as `Pipeline.run` takes them; None counts as not given."""
    given = {key: value for key, value in options.items() if value is not None}
    unknown = sorted(set(given) - _DIRECT)
    if unknown:
        raise ConfigError(
            f"There is no option {', '.join(map(repr, unknown))}. Options are: "
            f"{', '.join(sorted({*_DIRECT, *_OF_RUN}))}."
        )
    file = read_file(given.get("config"))
    run = {key: given.get(key, file.get("run", {}).get(key)) for key in _RUN}
    for key in ("parallelism", "checkpoint_partitions"):
        run[key] = None if run[key] is None else _count(run[key], setting(key))
    run["standby"] = None if run["standby"] is None else _flag(run["standby"], setting("standby"))
    return RunOptions(
        client=client_from(given, file),
        checkpoint=_checkpoint(given, file.get("checkpoint", {})),
        state=_state(given, file.get("state", {})),
        restart=_restart(given.get("restart") or file.get("restart", {})),
        inline=bool(given.get("inline", False)),
        accept_loss=given.get("accept_loss"),
        allow_dropped_fields=bool(given.get("allow_dropped_fields", False)),
        skip=_skips(given.get("skip", ())),
        restoration=_restoration(given, file.get("run", {})),
        **{key: value for key, value in run.items() if value is not None},
    )


def _skips(given: Any) -> tuple[RecordPlace, ...]:
    return tuple(map(record_place, [given] if isinstance(given, str) else given))


def record_place(text: str) -> RecordPlace:
    """A record as a message names it.

    >>> record_place("orders:0:42")
    RecordPlace(topic='orders', partition=0, offset=42)
    """
    topic, *numbers = str(text).rsplit(":", 2)
    if not topic or len(numbers) < 2 or not all(each.isdecimal() for each in numbers):
        raise ConfigError(f"skip is {text!r}: write topic:partition:offset, as orders:0:42.")
    return RecordPlace(topic, int(numbers[0]), int(numbers[1]))


def _restoration(given: Mapping[str, Any], file: Mapping[str, Any]) -> Restoration | None:
    """The savepoint to begin from, and what is said of it: what a file says is about the savepoint of the file."""
    told = {} if "from_savepoint" in given else {name: file[name] for name in _SAVEPOINT if name in file}
    found = {**told, **{name: given[name] for name in RESTORING if name in given}}
    found["map"] = {**_names(told.get("map", {})), **_names(given.get("map", {}))}
    found["allow_dropped_state"] = _flag(found.get("allow_dropped_state", False), setting("allow_dropped_state"))
    if "from_savepoint" in found:
        source = str(found["from_savepoint"])
        if not source.isdecimal():
            storage_url(source, setting("from_savepoint"), or_else="the number of a savepoint")
        return Restoration(source, found["map"], found["allow_dropped_state"], bool(found.get("rewind")))
    alone = [setting(name) for name in RESTORING[1:] if found.get(name)]
    if alone:
        raise ConfigError(f"{', '.join(alone)} is for a run that begins from a savepoint: add --from-savepoint.")
    return None


def _checkpoint(given: Mapping[str, Any], file: Mapping[str, Any]) -> CheckpointSettings:
    fields: dict[str, Any] = {}
    for name in _WORDS:
        value = given.get(_keyword(name), file.get(name))
        if value is not None:
            fields[name] = storage_setting(str(value)) if name == "storage" else str(value)
    for name in _FLAGS:
        value = given.get(name, file.get(name))
        if value is not None:
            fields[name] = _flag(value, setting(name))
    for name in _DURATIONS:
        value = given.get(_keyword(name), file.get(name))
        if value is not None:
            fields[f"{name}_ms"] = duration_ms(value, setting(name))
    for name in _COUNTS:
        value = given.get(_keyword(name), file.get(name))
        if value is not None:
            fields[name] = _count(value, setting(name))
    return CheckpointSettings(**fields)


def _state(given: Mapping[str, Any], file: Mapping[str, Any]) -> StateSettings:
    fields = {name: given.get(f"state_{name}", file.get(name)) for name in _STATE}
    memory = fields.pop("memory")
    found: dict[str, Any] = {name: str(value) for name, value in fields.items() if value is not None}
    if memory is not None:
        found["memory_bytes"] = byte_count(memory, setting("state_memory"))
    if found.get("backend", HASHMAP) != ROCKSDB:
        found["contradicting"] = _for_rocksdb(given, file)
    return StateSettings(**found)


def _for_rocksdb(given: Mapping[str, Any], file: Mapping[str, Any]) -> tuple[str, ...]:
    """What was given for it, of a run that does not take it. A backend that is given directly wins over that of the
    file with all that the file says for it, unless the file contradicts itself."""
    names = [name for name in _STATE if name != "backend"]
    direct = [setting(f"state_{name}") for name in names if f"state_{name}" in given]
    overruled = "state_backend" in given and file.get("backend") != HASHMAP
    return (*direct, *(f"[state] {name}" for name in names if name in file and not overruled))


def _restart(options: Any) -> dict[str, int | str]:
    if not isinstance(options, Mapping):
        raise ConfigError(
            f'restart is {options!r}: write a dict, as {{"strategy": "fixed_delay", "attempts": 3, "delay": "1s"}}.'
        )
    found: dict[str, int | str] = {"strategy": str(options.get("strategy", "exponential_delay"))}
    for name, value in options.items():
        if name in _RESTART_DURATIONS:
            found[f"{name}_ms"] = duration_ms(value, f"restart {name}")
        elif name in _RESTART_COUNTS:
            found[name] = _count(value, f"restart {name}")
        elif name != "strategy":
            known = ", ".join((*_RESTART_COUNTS, *_RESTART_DURATIONS))
            raise ConfigError(f"A restart strategy has no option {name!r}. Options are, depending on it: {known}.")
    return found


def _names(value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for pair in value.items() for name in pair):
        raise ConfigError(f'{setting("map")} is {value!r}: write a name for each name, as {{old = "new"}}.')
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: write true or false.")
    return value


def _count(value: Any, name: str) -> int:
    try:
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass
    raise ConfigError(f"{name} is {value!r}: write a whole number.")

"""The parser of settings: command line, keyword arguments, a TOML file and the environment make `RunOptions`.

Direct options win over the file, the file over the environment. An unknown key is an error that lists the known ones.
A file has the tables [run], [checkpoint], [state], [restart] and [kafka]; docs/settings.md has their keys. Durations
are written "500ms", "1.5s", "10m" or "1h", sizes "512mb" or "2gb".
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from exactlyonce.checkpoint.records.manifest import MarkedPlace, RecordPlace
from exactlyonce.checkpoint.records.storage_url import storage_url
from exactlyonce.checkpoint.settings import STRATEGIES, CheckpointSettings
from exactlyonce.connectors.kafka.client_config import ClientConfig, by_name
from exactlyonce.engines.options import HASHMAP, ROCKSDB, Restoration, RunOptions, StateSettings
from exactlyonce.pipeline.durations import duration_ms, written_duration
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import nearest, setting
from exactlyonce.pipeline.running import ClusterSettings, LocalSettings
from exactlyonce.pipeline.settings import Declared, declared, whole_number

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BOOTSTRAP_VARIABLE = "EXACTLYONCE_BOOTSTRAP_SERVERS"

TABLES: dict[str, dict[str, Declared]] = {
    table: {option.key: option for owner in owners for option in declared(owner).values() if option.setting.in_file}
    for table, owners in {
        "run": (RunOptions, Restoration), "checkpoint": (CheckpointSettings,), "state": (StateSettings,),
    }.items()
}  # fmt: skip
"""The settings of a file, by table and key."""
_RESTART = {
    option.name: option.name.endswith("_ms")
    for strategy in STRATEGIES.values()
    for option in fields(strategy)
    if option.init
}
"""The options of restart strategies, by field: whether they are durations."""
_OWNERS = (RunOptions, Restoration, CheckpointSettings, StateSettings)
_DIRECT = {option.keyword for owner in _OWNERS for option in declared(owner).values()} | {
    *ClusterSettings.__annotations__, "restart",
}  # fmt: skip
_KNOWN = sorted(LocalSettings.__annotations__)
"""These, and what the engine takes itself."""


def client_from(options: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> ClientConfig:
    """The client configuration of *options*, the file's `[kafka]` and the environment."""
    given = options.get("kafka") or {}
    if not isinstance(given, Mapping):
        raise ConfigError('kafka has to be a dict of librdkafka\'s settings, as {"security.protocol": "SASL_SSL"}.')
    direct = by_name([*given.items(), *_servers(options)])
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
    known = {table: [*settings] for table, settings in TABLES.items()}
    known["restart"] = ["strategy", *(name.removesuffix("_ms") for name in _RESTART)]
    for table, content in file.items():
        is_table = isinstance(content, dict)
        if table not in (*known, "kafka") and not is_table:
            raise ConfigError(f"{path}: {table!r} is in no table. {_meant(table, 'run', known)}")
        if table not in (*known, "kafka") or not is_table:
            near = nearest(table, known)
            raise ConfigError(
                f"{path}: there is no table [{table}]. {f'Did you mean [{near}]? ' if near else ''}Tables are: [run], "
                f"[checkpoint], [state], [restart], [kafka]."
            )
        for key in content:
            if table != "kafka" and key not in known[table]:
                raise ConfigError(f"{path}: [{table}] has no key {key!r}. {_meant(key, table, known)}")
    return file


def _meant(key: str, table: str, known: Mapping[str, list[str]]) -> str:
    """What is there instead of *key*: its table, the key that was meant, or all keys of *table*."""
    keywords = {(option.keyword): (other, name) for other, keys in TABLES.items() for name, option in keys.items()}
    other, name = keywords.get(key) or next(((other, key) for other, keys in known.items() if key in keys), ("", ""))
    if other:
        return f"Write it in [{other}], as {name}."
    if key.replace("_", ".") == "bootstrap.servers":
        return 'Write it in [kafka], as "bootstrap.servers".'
    near = nearest(key, known[table])
    return f"Did you mean {near}?" if near else f"It has: {', '.join(known[table])}."


def options_from(options: Mapping[str, Any]) -> RunOptions:
    """`RunOptions` from keyword arguments as `Pipeline.run` takes them; None counts as not given."""
    given = {key: value for key, value in options.items() if value is not None}
    unknown = sorted(set(given) - _DIRECT)
    if unknown:
        near = nearest(unknown[0], _KNOWN)
        raise ConfigError(
            f"There is no option {', '.join(map(repr, unknown))}. "
            + (f"Did you mean {near}?" if near else f"Options are: {', '.join(_KNOWN)}.")
        )
    file = read_file(given.get("config"))
    run = _fields(RunOptions, given, file.get("run", {}))
    run["skip"] = tuple(map(record_place, _listed(run.get("skip", ()))))
    run["accept_new_output"] = tuple(map(str, _listed(run.get("accept_new_output", ()))))
    return RunOptions(
        client=client_from(given, file),
        checkpoint=CheckpointSettings(**_fields(CheckpointSettings, given, file.get("checkpoint", {}))),
        state=_state(given, file.get("state", {})),
        restart=_restart(given.get("restart") or file.get("restart", {})),
        restoration=_restoration(given, file.get("run", {})),
        **run,
    )


class EffectiveSetting(NamedTuple):
    """A setting as a run would have it."""

    table: str
    key: str
    value: str
    """As in a file, or in words; a secret is hidden."""
    origin: str
    """"command line", "file", "environment" or "default"."""


def effective_settings(options: Mapping[str, Any]) -> list[EffectiveSetting]:
    """Each setting of a run with these *options*, as for `options_from`, and where it comes from.

    Opens no connection; without a cluster `bootstrap.servers` is "none".
    """
    given = {key: value for key, value in options.items() if value not in (None, {})}
    file = read_file(given.get("config"))
    kafka = {
        "environment": by_name(_servers({"bootstrap_servers": os.environ.get(BOOTSTRAP_VARIABLE)})),
        "file": by_name(file.get("kafka", {}).items()),
        "command line": by_name([*given.get("kafka", {}).items(), *_servers(given)]),
    }
    named = any("bootstrap.servers" in settings for settings in kafka.values())
    run = options_from(given if named else {**given, "bootstrap_servers": "none:1"})
    rows = [] if named else [EffectiveSetting("kafka", "bootstrap.servers", "none", "default")]
    for name, value in run.client.shown.items():
        origins = [origin for origin, settings in kafka.items() if name in settings]
        rows += [EffectiveSetting("kafka", name, value, origins[-1])] if origins else []
    holders: tuple[tuple[str, Any], ...] = (
        ("run", run), ("run", run.restoration or Restoration()), ("checkpoint", run.checkpoint), ("state", run.state),
    )  # fmt: skip
    for table, holder in holders:
        for field, option in declared(holder.__class__).items():
            in_file = option.setting.in_file and option.key in file.get(table, {})
            origin = "command line" if option.keyword in given else "file" if in_file else "default"
            value = option.default_text if origin == "default" else option.written(getattr(holder, field))
            rows.append(EffectiveSetting(table, option.key, value, origin))
    origin = "command line" if "restart" in given else "file" if "restart" in file else "default"
    strategy = vars(run.restart_strategy()) | {"strategy": run.restart["strategy"]}
    for name in ("strategy", *(name for name in _RESTART if name in strategy)):
        text = written_duration(strategy[name]) if name.endswith("_ms") else str(strategy[name])
        where = origin if name in run.restart else "default"
        rows.append(EffectiveSetting("restart", name.removesuffix("_ms"), text, where))
    return rows


def _servers(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    servers = given.get("bootstrap_servers")
    return [("bootstrap.servers", servers)] if servers else []


def parallelism_given(options: Mapping[str, Any]) -> int | None:
    """The parallelism of *options*, or of their file; None if neither has one."""
    run = read_file(options.get("config")).get("run", {})
    parallelism: int | None = _fields(RunOptions, options, run).get("parallelism")
    return parallelism


def _fields(owner: type, given: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of *owner* that were set, directly or in its table of the file."""
    values = {field: given.get(option.keyword, file.get(option.key)) for field, option in declared(owner).items()}
    return {field: declared(owner)[field].read(value) for field, value in values.items() if value is not None}


def absolute(place: str) -> str:
    """*place*, a URL or a path. A path that begins with ./, ../ or ~/ becomes absolute.

    >>> absolute("/backups"), absolute("/a/../b")
    ('/backups', '/a/../b')
    """
    return os.path.abspath(os.path.expanduser(place)) if place.startswith(("./", "../", "~/")) else place


def _listed(given: Any) -> Iterable[Any]:
    """*given*, or alone in a list: an option that may be repeated."""
    return [given] if isinstance(given, str) else given


_PLACE = re.compile(r"(.+):([0-9]+):([0-9]+)(?:@([0-9a-f]+))?", re.DOTALL)
"""Topic or another place, partition or number of the split, offset, and the mark of `MarkedPlace`."""


def record_place(text: str) -> RecordPlace:
    """The record that *text* names as error messages do.

    >>> record_place("orders:0:42")
    RecordPlace(topic='orders', partition=0, offset=42)
    >>> record_place("file:/data:7:42@0123456789ab")
    MarkedPlace(topic='file:/data', partition=7, offset=42, mark='0123456789ab')
    """
    if (parsed := _PLACE.fullmatch(str(text))) is None:
        raise ConfigError(f"skip is {text!r}: write topic:partition:offset, as orders:0:42.")
    topic, partition, offset, mark = parsed.groups()
    place = topic, int(partition), int(offset)
    return RecordPlace(*place) if mark is None else MarkedPlace(*place, mark)


def _restoration(given: Mapping[str, Any], file: Mapping[str, Any]) -> Restoration | None:
    """The savepoint to begin from. Options in a file are about the file's savepoint."""
    in_file = {} if "from_savepoint" in given else file
    values = _fields(Restoration, given, in_file)
    values["mapping"] = {**_names(in_file.get("map", {})), **_names(given.get("map", {}))}
    if "source" in values:
        source = values["source"] = absolute(str(values["source"]))
        if not source.isdecimal():
            storage_url(source, setting("from_savepoint"), or_else="the number of a savepoint")
        return Restoration(**values)
    alone = [option.named for field, option in declared(Restoration).items() if values.get(field)]
    if alone:
        raise ConfigError(f"{', '.join(alone)} is for a run that begins from a savepoint: add --from-savepoint.")
    return None


def _state(given: Mapping[str, Any], file: Mapping[str, Any]) -> StateSettings:
    values = _fields(StateSettings, given, file)
    if values.get("backend", HASHMAP) != ROCKSDB:
        values["contradicting"] = _for_rocksdb(given, file)
    return StateSettings(**values)


def _for_rocksdb(given: Mapping[str, Any], file: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings given for rocksdb in a run on another backend. A direct backend overrules the file with all its
    settings, unless the file contradicts itself."""
    options = [option for option in declared(StateSettings).values() if option.field != "backend"]
    direct = [option.named for option in options if option.keyword in given]
    overruled = "state_backend" in given and file.get("backend") != HASHMAP
    return (*direct, *(f"[state] {option.key}" for option in options if option.key in file and not overruled))


def _restart(options: Any) -> dict[str, int | str]:
    if not isinstance(options, Mapping):
        raise ConfigError(
            f'restart is {options!r}: write a dict, as {{"strategy": "fixed_delay", "attempts": 3, "delay": "1s"}}.'
        )
    restart: dict[str, int | str] = {"strategy": str(options.get("strategy", "exponential_delay"))}
    for name, value in options.items():
        if f"{name}_ms" in _RESTART:
            restart[f"{name}_ms"] = duration_ms(value, f"restart {name}")
        elif name in _RESTART:
            restart[name] = whole_number(value, f"restart {name}")
        elif name != "strategy":
            known = ", ".join(option.removesuffix("_ms") for option in _RESTART)
            raise ConfigError(f"A restart strategy has no option {name!r}. Options are, depending on it: {known}.")
    return restart


def _names(value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for pair in value.items() for name in pair):
        raise ConfigError(f'{setting("map")} is {value!r}: write a name for each name, as {{old = "new"}}.')
    return value

"""The options of a read of state, checked.

Invariants: nothing is opened; an option that is not known, or means nothing here, is an error that names what there is;
a secret written as a reference stays one, as in `read_options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.storage_url import storage_url
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.spark.source.read_options import KAFKA, count, flag, number
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import name_problem

STATE = "state"
"""The option that makes a read one of state."""
OPTIONS = (STATE, "operator", "checkpoint", "key", "keyType", "types", "params", "json", "minPartitions")
IN_TOPIC_ONLY = ("checkpoint", "minPartitions")
KEY_TYPES = ("bool", "bytes", "date", "datetime", "decimal", "float", "int", "str", "time", "timedelta", "uuid")


@dataclass(frozen=True)
class StateOptions:
    """A read of state, whole."""

    pipeline: str
    """Its name; empty: `url` is given."""
    url: str
    """Of an exported savepoint."""
    operator: str
    checkpoint: int | None
    """None: the newest."""
    key: str | None
    key_schema: Any
    """As `pipeline.schema.describe` gives it; None: not said."""
    types: str
    """`module:attribute` of the pipeline that knows the types; empty: none."""
    params: Mapping[str, str]
    in_json: bool
    partitions_min: int
    client_settings: Mapping[str, str] = field(repr=False)

    def client(self) -> ClientConfig:
        """How to reach the cluster; made where it is used, so that no looked-up secret travels."""
        return ClientConfig(self.client_settings)


def is_of_state(given: Mapping[str, str]) -> bool:
    """Whether these are the options of a read of state."""
    return any(name.lower() == STATE for name in given)


def parse_state_options(given: Mapping[str, str]) -> StateOptions:
    """Check and parse. Names may be written in any case, as always in Spark."""
    options = {name.lower(): value for name, value in given.items()}
    client = {name[len(KAFKA) :]: value for name, value in options.items() if name.startswith(KAFKA)}
    where = options[STATE].strip()
    exported = "://" in where or where.startswith("/")
    _refuse_unknown(options, exported)
    if exported:
        storage_url(where, STATE)
    if not exported and (problem := name_problem(where)):
        raise ConfigError(
            f"state: the name of a pipeline, {problem}. Give the name, or the URL of an exported savepoint; the option "
            f"types names the module."
        )
    if not exported and "bootstrap.servers" not in client:
        raise ConfigError("kafka.bootstrap.servers is not set. Name at least one broker, as host:port.")
    if "params" in options and "types" not in options:
        raise ConfigError("params is for a function that types names. Leave it out, or give types.")
    parsed = StateOptions(
        pipeline="" if exported else where,
        url=where if exported else "",
        operator=options.get("operator", ""),
        checkpoint=number("checkpoint", options["checkpoint"]) if "checkpoint" in options else None,
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


def _refuse_unknown(options: Mapping[str, str], exported: bool) -> None:
    known = {name.lower() for name in OPTIONS}
    unknown = sorted(name for name in options if name not in known and not name.startswith(KAFKA))
    if unknown:
        raise ConfigError(
            f"There is no option {', '.join(map(repr, unknown))} for a read of state. Options are: "
            f"{', '.join(OPTIONS)}, and kafka.NAME for any setting of librdkafka, as kafka.bootstrap.servers."
        )
    if exported:
        misplaced = [name for name in IN_TOPIC_ONLY if name.lower() in options]
        misplaced += [name for name in options if name.startswith(KAFKA)]
        if misplaced:
            raise ConfigError(
                f"{', '.join(misplaced)} is not for an exported savepoint, which is one checkpoint in files. Leave it "
                f"out, or give the name of a pipeline instead of the URL."
            )


def _key_schema(text: str) -> Any:
    """A type of keys: a word, or the words of a tuple.

    >>> _key_schema("str"), _key_schema("str, int")
    ('str', {'tuple': ['str', 'int']})
    """
    words = [each.strip() for each in text.split(",")]
    if wrong := [each for each in words if each not in KEY_TYPES]:
        raise ConfigError(
            f"keyType is {text!r}: {wrong[0]!r} is no type of a key. Write one of {', '.join(KEY_TYPES)}; for a tuple "
            f"several, as 'str, int'."
        )
    return words[0] if len(words) == 1 else {"tuple": words}


def _params(text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(f'params is {text!r}, which is not read ({error}). Write JSON: {{"name": "v2"}}.') from None

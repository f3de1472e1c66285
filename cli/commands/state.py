"""`exactlyonce state`: shows the keyed state of operators at a checkpoint. It only reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from exactlyonce.cli import text
from exactlyonce.cli.arguments import (
    Commands,
    add_cluster,
    add_command,
    add_pipeline_name,
    at_least_one,
    client,
    pipeline_name,
)
from exactlyonce.pipeline.avro import as_plain_schema, avro_of
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.sizes import shown_bytes

if TYPE_CHECKING:
    from exactlyonce.views.state import KeyView, OperatorView, StateView

_EXAMPLES = """\
Show the state of a pipeline at its newest checkpoint, or at another retained one: without
OPERATOR the operators that keep state, with it every key and its state. It is read from
the blocks of the checkpoint, which name its type: the pipeline's code is not needed, and
a running pipeline is not disturbed.

examples:
  exactlyonce state order-totals
  exactlyonce state order-totals totals
  exactlyonce state order-totals totals --key ann
  exactlyonce state order-totals totals --at 41 --json > state.jsonl

Write a key as it is, or in JSON: 7 finds the number and the text, '["ann", 1]' a tuple.
Windows that are not over have a line for each key, with start and end in UTC.
"""
_TIMES = ["start", "end"]
_LINES = 1_000
"""The default limit of a table; lines of JSON have none."""


def add(commands: Commands) -> None:
    usage = "PIPELINE [OPERATOR] [options]"
    parser = add_command(commands, "state", usage, "show the state of operators", _EXAMPLES, state)
    add_pipeline_name(parser)
    parser.add_argument("operator", metavar="OPERATOR", nargs="?", help="the id of an operator")
    parser.add_argument("--key", metavar="K", help="show this key only")
    parser.add_argument("--at", metavar="N", type=int, help="at checkpoint N (default: the newest)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each key")
    help_text = f"the most keys shown (default: all in JSON, {_LINES:,} in a table)"
    parser.add_argument("--limit", metavar="N", type=at_least_one, help=help_text)
    add_cluster(parser)


def state(args: argparse.Namespace) -> int:
    from exactlyonce.views.state import state_at

    if args.key is not None and args.operator is None:
        raise ConfigError("--key is for one operator: name it after the pipeline.")
    config = client(args)
    with state_at(config, pipeline_name(args), args.at) as view:
        if args.operator is None:
            print(*_operators(view, as_json=args.json), sep="\n")
        else:
            _print(view, args)
    return 0


def _operators(view: StateView, *, as_json: bool) -> Iterator[str]:
    manifest, operators = view.manifest, view.operators()
    if as_json:
        for operator in operators:
            line = {
                "operator": operator.operator, "checkpoint": operator.checkpoint, "parallelism": operator.parallelism,
                "state_bytes": operator.state_bytes, "type": operator.schema,
            }  # fmt: skip
            yield msgspec.json.encode(line).decode()
        return
    yield f"{manifest.pipeline} at checkpoint {manifest.checkpoint}, {text.moment(manifest.completed_at_ms)}"
    if not operators:
        yield "No operator keeps state."
        return
    rows = [
        (operator.operator, shown_bytes(operator.state_bytes), str(operator.parallelism), type_text(operator.schema))
        for operator in operators
    ]
    yield from ("", *text.table(("operator", ">size", ">subtasks", "state"), rows))


def _print(view: StateView, args: argparse.Namespace) -> None:
    operator, keys = view.operator(args.operator), view.keys(args.operator, args.key)
    if args.json:
        for line in lines(operator, islice(keys, args.limit)):
            print(line)
        return
    limit = _LINES if args.limit is None else args.limit
    first = list(islice(keys, limit + 1))
    version = f", version {operator.version}" if operator.version > 1 else ""
    place = f"{operator.operator} of {view.manifest.pipeline} at checkpoint {operator.checkpoint}"
    windows = "" if operator.meaning is None else f", {operator.meaning}"
    print(f"{place}: {type_text(operator.schema)}{version}{windows}")
    if first:
        print("", *table(first[:limit], operator), sep="\n")
    else:
        print("No key has a state." if args.key is None else "This key has no state.")
    if len(first) > limit:
        print("and more: --limit N shows N keys, --json all.")


def lines(operator: OperatorView, keys: Iterable[KeyView]) -> Iterator[str]:
    from exactlyonce.state.json_text import json_text

    for key in keys:
        yield json_text({"operator": operator.operator, "checkpoint": operator.checkpoint, **vars(key)})


def table(keys: Sequence[KeyView], operator: OperatorView) -> list[str]:
    """The lines of a table; with the version of each state if some have an older one, and the times of windows."""
    columns, rows = [">group", "key", *_TIMES * (operator.meaning is not None), "state"], list(map(row, keys))
    if all(key.version == operator.version for key in keys):
        return text.table(columns, rows)
    versions = [str(key.version) for key in keys]
    return text.table(
        (*columns, ">version"), [(*cells, version) for cells, version in zip(rows, versions, strict=True)]
    )


def row(key: KeyView) -> text.Row:
    from exactlyonce.state.json_text import json_text
    from exactlyonce.views.state import TimedKeyView

    times = [key.start, key.end] if isinstance(key, TimedKeyView) else []
    shown = ("-" if time is None else f"{time:%Y-%m-%d %H:%M:%S.%f}"[:-3] for time in times)
    return (str(key.key_group), json_text(key.key), *shown, json_text(key.state))


def type_text(schema: Any) -> str:
    """A schema in a few words.

    >>> type_text({"record": "Total", "fields": [["sum", "int"], ["names", {"optional": {"list": "str"}}]]})
    'Total(sum: int, names: list[str])'
    """
    if not isinstance(schema, dict):
        return str(schema or "empty")
    if (avro := avro_of(schema)) is not None:
        return f"{type_text(as_plain_schema(avro))} by Avro"
    if "optional" in schema:
        return type_text(schema["optional"])
    if "fields" in schema:
        return f"{schema['record']}({', '.join(f'{name}: {type_text(of)}' for name, of in schema['fields'])})"
    if "union" in schema:
        return " | ".join(map(type_text, schema["union"]))
    for name, of in schema.items():
        if name in ("dict", "tuple", "list", "set"):
            return f"{name}[{', '.join(map(type_text, of)) if isinstance(of, list) else type_text(of)}]"
    return str(schema.get("record") or schema.get("enum") or schema)

"""`exactlyonce state`: shows and serves the keyed state of operators, and imports rows as such state.

Invariant: nothing is changed but a new folder of `state import`, a savepoint.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from exactlyonce.cli import text
from exactlyonce.cli.arguments import (
    Parser,
    add_action,
    add_cluster,
    add_pipeline,
    add_pipeline_name,
    at_least_one,
    client,
    loaded,
    named,
    pipeline_name,
    set_command,
)
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.positions import BEGINNING
from exactlyonce.pipeline.secrets import is_reference, look_up
from exactlyonce.pipeline.sizes import byte_count, counted, shown_bytes

if TYPE_CHECKING:
    from exactlyonce.engines.savepoints.shown_state import KeyView, OperatorView, StateView

_EXAMPLES = """\
Show the state of a pipeline, or make a savepoint of state that comes from elsewhere.

examples:
  exactlyonce state show order-totals totals
  exactlyonce state import orders:pipeline totals totals.jsonl --to /savepoints \\
      --offsets group:legacy-app
"""
_SHOW = """\
Show the state of a pipeline at its newest checkpoint, or at another retained one: without
OPERATOR the operators that keep state, with it every key and its state. It is read from
the blocks of the checkpoint, which name its type: the pipeline's code is not needed, and
a running pipeline is not disturbed.

examples:
  exactlyonce state show order-totals
  exactlyonce state show order-totals totals
  exactlyonce state show order-totals totals --key ann
  exactlyonce state show order-totals totals --at 41 --json > state.jsonl

Write a key as it is, or in JSON: 7 finds the number and the text, '["ann", 1]' a tuple.
Windows that are not over have a line for each key, with start and end in UTC.
"""
_IMPORT = """\
Make a savepoint of rows, for a pipeline that takes over from another program: the state
of OPERATOR by key, and the offsets at which the sources go on. Every row is checked
against the types of the operator; the error names the row and the field, and nothing is
written. `exactlyonce run MODULE:PIPELINE --from-savepoint URL` then begins with it.

FILE has lines of JSON, also in .gz, or is a .parquet file; - is stdin. A row has a key
and a state, {"key": "ann", "state": {"sum": 7}}, or the fields of the state beside the
key, {"key": "ann", "sum": 7}. With --query, FILE is the place of the connection string
of a PostgreSQL or MySQL, env:NAME or file:/path, and the columns are those of the query.

examples:
  exactlyonce state import orders:pipeline totals totals.jsonl --to /savepoints \\
      --offsets group:legacy-app
  exactlyonce state import orders:pipeline totals env:LEGACY_DSN --to /savepoints \\
      --query "SELECT customer AS key, total AS state FROM totals" --offsets earliest
  exactlyonce state show order-totals totals --json | jq -c '.state *= 100' |
      exactlyonce state import orders:pipeline totals - --to /savepoints --base 42

For several operators, import one after the other, each with the savepoint before as the
--base: it has the offsets, and all state but that of OPERATOR.
"""
_SERVE = """\
Answer what the state of a key is, over HTTP: at the newest checkpoint, so that nothing
undoes an answer. It works from any machine, while the pipeline runs and after it, and
without its code. What was read of a key group is kept, and follows the checkpoints.

examples:
  exactlyonce state serve order-totals
  curl http://127.0.0.1:8086/state/totals/ann
  curl 'http://127.0.0.1:8086/state/totals?key=ann&key=bob'
  curl 'http://127.0.0.1:8086/state/totals?from=a&to=b&limit=100'
  curl 'http://127.0.0.1:8086/state/totals/ann?min_checkpoint=42'
  exactlyonce state serve order-totals --listen 0.0.0.0:8086 --token env:STATE_TOKEN

An answer is JSON, with the number of the checkpoint. min_checkpoint waits until that one
is complete. Beyond this machine a token is needed, which a request has in its header
Authorization: Bearer TOKEN; put a proxy with TLS before it. Ctrl-C ends it.
"""
LISTEN = "127.0.0.1:8086"
_TIMES = ["start", "end"]
_LINES = 1_000
"""The default limit of a table; lines of JSON have none."""


def add(parser: Parser) -> None:
    usage = "show|serve|import PIPELINE [OPERATOR] [options]"
    set_command(parser, usage, _EXAMPLES, show)
    parser.moved = ". `exactlyonce state PIPELINE` is `exactlyonce state show PIPELINE` now"
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    usage = "PIPELINE [OPERATOR] [options]"
    showing = add_action(actions, "show", usage, "the state of operators, by key", _SHOW, show)
    add_pipeline_name(showing)
    showing.add_argument("operator", metavar="OPERATOR", nargs="?", help="the id of an operator")
    showing.add_argument("--key", metavar="K", help="show this key only")
    showing.add_argument("--at", metavar="N", type=int, help="at checkpoint N (default: the newest)")
    showing.add_argument("--json", action="store_true", help="a line of JSON for each key")
    help_text = f"the most keys shown (default: all in JSON, {_LINES:,} in a table)"
    showing.add_argument("--limit", metavar="N", type=at_least_one, help=help_text)
    add_cluster(showing)
    usage = "PIPELINE [options]"
    serving = add_action(actions, "serve", usage, "answer the state of keys over HTTP", _SERVE, serve)
    add_pipeline_name(serving)
    serving.add_argument("--listen", metavar="HOST:PORT", default=LISTEN, help=f"where (default: {LISTEN})")
    serving.add_argument(
        "--token", metavar="REF", default="", help="the token that requests have: env:NAME or file:/path"
    )
    help_text = "memory for key groups that were read (default: 512mb)"
    serving.add_argument("--memory", metavar="SIZE", default="512mb", help=help_text)
    add_cluster(serving)
    usage = "MODULE:PIPELINE OPERATOR FILE|- --to URL [options]"
    importing = add_action(actions, "import", usage, "a savepoint of rows", _IMPORT, import_rows)
    add_pipeline(importing)
    importing.add_argument("operator", metavar="OPERATOR", help="the id of an operator that keeps state")
    importing.add_argument("rows", metavar="FILE|-", help="the rows; see above")
    importing.add_argument("--query", metavar="SQL", help="the rows are those of this query")
    help_text = "write the savepoint below URL: /folder, hdfs://host:port/folder or s3://bucket/prefix"
    importing.add_argument("--to", metavar="URL", required=True, help=help_text)
    help_text = f"where the sources go on (default: as --base): {BEGINNING}"
    importing.add_argument("--offsets", metavar="WHERE", help=help_text)
    help_text = "take over all other state from savepoint N, or from one that was exported to URL"
    importing.add_argument("--base", metavar="N|URL", help=help_text)
    importing.add_argument("--json", action="store_true", help="the result as one JSON document")
    add_cluster(importing)


def show(args: argparse.Namespace) -> int:
    from exactlyonce.engines.savepoints.shown_state import state_at

    if args.key is not None and args.operator is None:
        raise ConfigError("--key is for one operator: name it after the pipeline.")
    config = client(args)
    with state_at(config, pipeline_name(args), args.at) as view:
        if args.operator is None:
            print(*_operators(view, as_json=args.json), sep="\n")
        else:
            _print(view, args)
    return 0


def serve(args: argparse.Namespace) -> int:
    """Answer requests until Ctrl-C."""
    from exactlyonce.engines.local.monitoring.server import serving
    from exactlyonce.engines.local.monitoring.state_service import StateService, token_for
    from exactlyonce.engines.options import listening_at
    from exactlyonce.engines.savepoints.state_reader import StateReader

    token, pipeline = token_for(args.listen, args.token, "--token"), pipeline_name(args)
    with StateReader.of(client(args), pipeline, byte_count(args.memory, "--memory")) as reader:
        reader.look()  # what is wrong is said before anybody asks
        with (
            StateService(reader, token).following() as paths,
            serving(*listening_at(args.listen), paths, keep_alive=True),
        ):
            print(f"http://{args.listen}/state/OPERATOR/KEY answers for {pipeline}. Ctrl-C ends it.", flush=True)
            threading.Event().wait()
    return 0


def import_rows(args: argparse.Namespace) -> int:
    """Write a savepoint of rows, and say where it is."""
    from exactlyonce.engines.savepoints.seeding import seed

    config, pipeline = client(args), loaded(args).pipeline
    with closing(_rows(args.rows, args.query)) as rows:
        states = {args.operator: rows}
        seeded = seed(pipeline.build(), states, config, to=args.to, offsets=args.offsets, base=args.base)
    count = seeded.rows[args.operator]
    if seeded.unchecked:
        text.to_stderr(
            "The function of key_by has no annotation, so that the keys were not checked: the state of 7 is not that "
            'of "7". Annotate it, as in `def customer(order: Order) -> str`, and import again.'
        )
    if args.json:
        document = {
            "pipeline": pipeline.name, "operator": args.operator, "rows": count, "offsets": seeded.saved.offsets,
            "url": seeded.url,
        }  # fmt: skip
        print(msgspec.json.encode(document).decode())
        return 0
    print(f"{counted(count, 'row')} for operator {args.operator} of {pipeline.name}.")
    print(f"Written to {seeded.url}")
    print(f"`exactlyonce run {named(args)} --from-savepoint {seeded.url}` begins with it.")
    return 0


def _rows(place: str, query: str | None) -> Generator[Any]:
    """The rows at *place*, one by one; ConfigError without any: what wrote them has failed, most likely."""
    empty = True
    for entry in _read_rows(place, query):
        empty = False
        yield entry
    if empty:
        shown = "The query" if query is not None else "stdin" if place == "-" else place
        raise ConfigError(f"{shown} has no rows. Nothing was written: look whether all went well where they come from.")


def _read_rows(place: str, query: str | None) -> Iterator[Any]:
    """Lines of JSON, or columns by name."""
    if query is not None:
        yield from _query_rows(place, query)
    elif place == "-":
        yield from sys.stdin.buffer
    elif is_reference(place):
        raise ConfigError(f'{place} is the place of a connection string: add --query, as "SELECT ... AS key, ...".')
    elif place.endswith(".parquet"):
        yield from _parquet_rows(place)
    else:
        with _explained(place), gzip.open(place) if place.endswith(".gz") else open(place, "rb") as lines:
            yield from lines


def _query_rows(dsn: str, query: str) -> Iterator[Any]:
    """The rows of *query* in the database that *dsn*, a reference, names."""
    if not is_reference(dsn):
        raise ConfigError("With --query, FILE is the place of a connection string: write env:NAME or file:/path.")
    from exactlyonce.connectors import MySQLTableSource, PostgresTableSource

    # the connection strings of PostgreSQL may be no URLs
    database = MySQLTableSource if look_up("FILE", dsn).startswith(MySQLTableSource.schemes) else PostgresTableSource
    with needing(database.extra, database.driver, "--query"):
        yield from database.query(dsn, query)


def _parquet_rows(place: str) -> Iterator[dict[str, Any]]:
    with needing("files", "pyarrow", place):
        import pyarrow.parquet
    with _explained(place), pyarrow.parquet.ParquetFile(place) as file:
        for batch in file.iter_batches(_LINES):
            yield from batch.to_pylist()


@contextmanager
def _explained(place: str) -> Iterator[None]:
    """ConfigError where the file at *place* cannot be read."""
    try:
        yield
    except (OSError, EOFError, ValueError) as error:  # pyarrow's errors are ValueErrors
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{place} cannot be read: {why}. Nothing was written.") from None


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
    from exactlyonce.state.state_type import json_text

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
    from exactlyonce.engines.savepoints.shown_state import TimedKeyView
    from exactlyonce.state.state_type import json_text

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

"""`exactlyonce explain`: the graph of a pipeline as text. Opens no connection."""

from __future__ import annotations

import argparse

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Parser, add_pipeline, loaded, set_command

_EXAMPLES = """\
Check a pipeline and show its graph: the id, kind and inputs of each node (`<=` after a
shuffle, `<*` where all subtasks get each record), its topic or table, and its types. Opens
no connection.

examples:
  exactlyonce explain orders:pipeline
  exactlyonce explain orders:make --param region=eu
"""


def add(parser: Parser) -> None:
    usage = "MODULE:PIPELINE [options]"
    set_command(parser, usage, _EXAMPLES, explain)
    add_pipeline(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def explain(args: argparse.Namespace) -> int:
    graph = loaded(args).pipeline.build()
    print(text.document(graph.describe() | {"fingerprint": graph.fingerprint()}) if args.json else graph.explain())
    return 0

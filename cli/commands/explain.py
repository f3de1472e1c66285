"""`exactlyonce explain`: the graph of a pipeline as text. Opens no connection."""

from __future__ import annotations

import argparse

from exactlyonce.cli.arguments import Commands, add_command, add_pipeline, loaded

_EXAMPLES = """\
Check a pipeline and show its graph: the id, kind and inputs of each node (`<=` after a
shuffle), its topic or table, and its types. Opens no connection.

examples:
  exactlyonce explain orders:pipeline
  exactlyonce explain orders:make --param region=eu
"""


def add(commands: Commands) -> None:
    usage, summary = "MODULE:PIPELINE [options]", "check a pipeline and show its graph"
    add_pipeline(add_command(commands, "explain", usage, summary, _EXAMPLES, explain))


def explain(args: argparse.Namespace) -> int:
    print(loaded(args).pipeline.build().explain())
    return 0

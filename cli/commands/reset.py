"""`exactlyonce reset`: deletes all traces of a pipeline. It changes nothing before it has shown them and asked."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Parser, add_cluster, add_pipeline_name, client, pipeline_name, set_command
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.sizes import counted

if TYPE_CHECKING:
    from exactlyonce.engines.pipeline_resources import PipelineResources

_DECLINED = 1
_LABEL_WIDTH = 15

_EXAMPLES = """\
Delete all traces of a pipeline or of a Spark sink: its checkpoints with all state, its
open transactions, its group offsets. The next run starts from scratch. Input and output
topics are never touched: existing output stays, and a new run writes it again. Stores
are not touched either: a store with a ledger halts a new run until its target and its
ledger are emptied. The command shows what it will delete, and asks.

examples:
  exactlyonce reset order-totals
  exactlyonce reset order-totals --yes --bootstrap-servers 127.0.0.1:9092
"""


def add(parser: Parser) -> None:
    set_command(parser, "PIPELINE [options]", _EXAMPLES, reset)
    add_pipeline_name(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--force", action="store_true", help="also if it may be running")
    add_cluster(parser)


def reset(args: argparse.Namespace) -> int:
    from exactlyonce.engines.pipeline_resources import erase, find

    config = client(args)
    resources = find(config, pipeline_name(args))
    _show(resources, config.bootstrap_servers)
    _require_dead(resources, args)
    if not args.yes:
        if not text.agreed(f"Reset {resources.pipeline}?"):
            print("Nothing was changed.")
            return _DECLINED
        shown, resources = resources, find(config, resources.pipeline)  # the answer may have taken any time
        _require_dead(resources, args)
        _require_same(shown, resources)
    kept = erase(config, resources, print)
    if kept:
        print(f"Group {resources.pipeline} is in use by a consumer: its offsets in {', '.join(kept)} were kept.")
    print(f"{resources.pipeline} is reset; its next run starts from scratch.")
    return 0


def _require_dead(resources: PipelineResources, args: argparse.Namespace) -> None:
    from exactlyonce.engines.system_clock import SystemClock

    sign = resources.sign_of_life(SystemClock().now_ms())
    if sign and not args.force:
        raise ConfigError(
            f"{resources.pipeline} may be running: {sign}. Stop it first, or add --force if it has ended."
        )


def _require_same(shown: PipelineResources, now: PipelineResources) -> None:
    """ConfigError if the pipeline has run since its resources were shown."""
    if _newest(shown) != _newest(now):
        raise ConfigError(f"Nothing was changed: {now.pipeline} has run since its traces were shown. Run reset again.")


def _newest(resources: PipelineResources) -> tuple[int, int] | None:
    history = resources.history
    return None if history is None else (history.incarnation_latest, history.checkpoint_latest)


def _show(resources: PipelineResources, bootstrap_servers: str) -> None:
    width = text.terminal_width()
    title = f"Traces of {resources.pipeline} at {bootstrap_servers} to be deleted:"
    for line, parts in ((title, going(resources)), ("Kept:", staying(resources))):
        print(line)
        for label, content in parts:
            print(*text.labelled(label, content, _LABEL_WIDTH, width), sep="\n")


def going(resources: PipelineResources) -> Iterator[tuple[str, str]]:
    """The resources that a reset deletes, with labels."""
    from exactlyonce.checkpoint.requests import TxnState

    history = resources.history
    if resources.topic:
        numbers = ", ".join(str(manifest.checkpoint) for manifest in history.retained) if history else ""
        which = f"{numbers or 'none'}, and all state" if history else "unreadable ones"
        yield "checkpoints", f"{which}: topic {resources.topic}"
    for storage in resources.storages():
        yield "", f"all files of this pipeline in {storage}"
    if resources.unreadable:
        yield "", f"{resources.unreadable} Blocks outside of the topic, if any, cannot be found: they stay."
    if resources.transactions:
        still_open = sum(transaction.state not in TxnState.CLOSED for transaction in resources.transactions)
        fenced = f"{counted(len(resources.transactions), 'id')} fenced, so that no older process can write"
        yield "transactions", f"{still_open} open, to be aborted; {fenced}" if still_open else fenced
    if history and history.unfinalized:
        number = history.unfinalized.checkpoint
        yield "", f"Checkpoint {number} is decided, but its output may not be visible yet: a run would finish it."
    topics = [f"{topic} ({counted(len(partitions), 'partition')})" for topic, partitions in resources.inputs().items()]
    if topics:
        yield "group offsets", f"of group {resources.pipeline} in {', '.join(topics)}"


def staying(resources: PipelineResources) -> Iterator[tuple[str, str]]:
    """The data that a reset keeps, with labels."""
    yield "input", ", ".join(resources.inputs()) or "all topics"
    sinks = resources.stores()
    if resources.outputs() or not sinks:
        topics = ", ".join(resources.outputs()) or "all topics"
        yield "output", f"{topics}; a new run writes it again, beside the existing output"
    if sinks:
        yield "stores", f"rows and ledger of {', '.join(sinks)}; a new run halts until both are emptied"

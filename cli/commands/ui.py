"""`exactlyonce ui`: a page about pipelines, made from their checkpoint topics. It only reads, and fences nobody."""

from __future__ import annotations

import argparse
import threading
from typing import TYPE_CHECKING

import msgspec

from exactlyonce.cli.arguments import Parser, add_cluster, client, name_and_graph, set_command
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.client_config import ClientConfig
    from exactlyonce.engines.local.monitoring.page import CheckpointDetails, PipelineState, PipelineSummary
    from exactlyonce.pipeline.graph import LogicalGraph

_EXAMPLES = """\
Show pipelines, or sinks of Spark, on a page for a browser: whether each is well, its
checkpoints, the lag of each partition, its open transactions and what happened to it. All
of it comes from the checkpoint topic and the brokers, so it works from any machine, and
also while nothing runs. A running pipeline is not disturbed. Ctrl-C ends it.

examples:
  exactlyonce ui order-totals
  exactlyonce ui orders:pipeline shipments --listen 127.0.0.1:8090

With module:pipeline the page has the graph, too. A run shows more of itself by
`exactlyonce run --ui`: rates of operators, and what its workers wait for.
"""
LISTEN = "127.0.0.1:8080"
LOOK_S = 1.0
"""From one look at a pipeline to the next, unless there is a new decision."""
NEWS_S = 0.2
"""How often it is asked whether there is one."""


def add(parser: Parser) -> None:
    set_command(parser, "PIPELINE ... [options]", _EXAMPLES, ui)
    parser.add_argument("pipelines", metavar="PIPELINE", nargs="+", help="its name, its sinkId or module:pipeline")
    parser.add_argument("--listen", metavar="HOST:PORT", default=LISTEN, help=f"where to answer (default: {LISTEN})")
    add_cluster(parser)


def ui(args: argparse.Namespace) -> int:
    from exactlyonce.engines.local.monitoring.page import Pipelines, paths_of
    from exactlyonce.engines.local.monitoring.server import serving
    from exactlyonce.engines.local.monitoring.serving import Paths
    from exactlyonce.engines.options import listening_at

    host, port = listening_at(args.listen)
    named = [argparse.Namespace(pipeline=text, param=[]) for text in args.pipelines]
    chosen = dict(map(name_and_graph, named))
    if len(chosen) < len(named):
        raise ConfigError("A pipeline was given twice. Give each once.")
    config = client(args)
    ended = threading.Event()
    watched = [Watched(config, name, graph, ended) for name, graph in chosen.items()]
    paths: Paths
    if len(watched) == 1:
        paths = paths_of(watched[0].state, watched[0].checkpoint, watched[0].changes)
    else:
        paths = paths_of(lambda: Pipelines([one.summary() for one in watched]), lambda _: None)
        for one in watched:
            paths = {**paths, **paths_of(one.state, one.checkpoint, one.changes, f"/{one.pipeline}/")}
    with serving(host, port, paths):
        threads = [threading.Thread(target=one.run, name="watch", daemon=True) for one in watched]
        for thread in threads:
            thread.start()
        print(f"http://{args.listen}/ shows {', '.join(chosen)}. Ctrl-C ends it.", flush=True)
        try:
            ended.wait()
        finally:
            ended.set()
    return 0


class Watched:
    """Looks at a pipeline on a thread until *ended* is set; others ask for what it saw last."""

    def __init__(self, config: ClientConfig, pipeline: str, graph: LogicalGraph | None, ended: threading.Event) -> None:
        from exactlyonce.engines.local.monitoring.page import Changes
        from exactlyonce.views.watch import Watch

        self.pipeline = pipeline
        self._watch, self._ended = Watch(config, pipeline, graph), ended
        self.changes = Changes()
        self._looked = threading.Event()
        self._state: PipelineState
        """Replaced whole, for any thread may ask."""

    def run(self) -> None:
        from exactlyonce.engines.system_clock import SystemClock

        clock = SystemClock()
        while not self._ended.is_set():
            due_ms = clock.monotonic_ms() + 1000 * LOOK_S
            self._state = self._watch.look(clock.now_ms())
            self._looked.set()
            self.changes.add()
            while not self._ended.wait(NEWS_S) and clock.monotonic_ms() < due_ms and not self._watch.has_news():
                pass

    def state(self) -> PipelineState:
        self._looked.wait()  # the first look
        return self._state

    def summary(self) -> PipelineSummary:
        from exactlyonce.engines.local.monitoring.page import PipelineSummary

        return msgspec.convert(self.state(), PipelineSummary, from_attributes=True)

    def checkpoint(self, number: int) -> CheckpointDetails | None:
        return self._watch.checkpoint(number)

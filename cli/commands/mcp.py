"""`exactlyonce mcp`: read-only tools about pipelines, by the Model Context Protocol over stdin and stdout.

Invariants: a tool runs one command that only reads, with --json, as a process of its own, so that nothing a pipeline's
module prints gets into the protocol. Only the pipelines of the command line can be asked about: no module is imported
because a client named it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from exactlyonce.cli.arguments import Parser, add_cluster, set_command
from exactlyonce.pipeline.extras import needing

_EXAMPLES = """\
Answer questions about pipelines, or sinks of Spark, to a client of the Model Context
Protocol, which starts this command: graph, checkpoints, state, waiting output, and what is
wrong. The tools only read, and only these pipelines. Needs the extra `mcp`.

examples:
  exactlyonce mcp order-totals --bootstrap-servers 127.0.0.1:9092
  exactlyonce mcp orders:pipeline shipments --config production.toml
                              with module:pipeline, `explain` shows the graph
"""
_INSTRUCTIONS = (
    "Facts about Kafka pipelines of exactlyonce: {pipelines}. Begin with `doctor` where something is wrong, and with "
    "`checkpoints` otherwise. Nothing here changes anything."
)
_OPERATOR = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")  # no option
CHECKPOINTS, KEYS = 10, 100
"""How many are shown at most, unless more are asked for."""
LIMIT_S = 300.0


def add(parser: Parser) -> None:
    set_command(parser, "PIPELINE ... [options]", _EXAMPLES, mcp)
    parser.add_argument("pipelines", metavar="PIPELINE", nargs="+", help="its name, its sinkId or module:pipeline")
    add_cluster(parser)


def mcp(args: argparse.Namespace) -> int:
    with needing("mcp", "mcp", "exactlyonce mcp"):
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    server = MCPServer(
        "exactlyonce", log_level="ERROR", instructions=_INSTRUCTIONS.format(pipelines=", ".join(args.pipelines))
    )
    questions = Questions(args.pipelines, _cluster(args))
    tools: tuple[Callable[..., Any], ...] = (
        questions.explain, questions.checkpoints, questions.state, questions.transactions, questions.doctor
    )  # fmt: skip
    for tool in tools:
        server.add_tool(tool, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))
    server.run("stdio")
    return 0


def _cluster(args: argparse.Namespace) -> list[str]:
    """The cluster's arguments, for other commands."""
    servers = ["--bootstrap-servers", args.bootstrap_servers] if args.bootstrap_servers else []
    config = ["--config", args.config] if args.config else []
    return [*servers, *config, *(word for name, value in args.kafka for word in ("--kafka", f"{name}={value}"))]


class Questions:
    """The tools: their docstrings are what a client sees."""

    def __init__(self, pipelines: Sequence[str], cluster: Sequence[str]) -> None:
        self._pipelines, self._cluster = pipelines, cluster

    def explain(self, pipeline: str = "") -> str:
        """Show the graph of a pipeline: its nodes, their inputs, topics or tables, and types."""
        named = self._named(pipeline)
        if ":" not in named:
            raise _refusal(f"{named} is known by its name alone: its code is not here.")
        return _asked("explain", named)

    def checkpoints(self, pipeline: str = "", last: int = CHECKPOINTS, checkpoint: int | None = None) -> dict[str, Any]:
        """List the last checkpoints: times, sizes, offsets of the input, and what became of their output.

        With *checkpoint*, that one, and why it took as long as it did: the phases of its subtasks, the slowest first.
        """
        one = [] if checkpoint is None else [str(checkpoint)]
        answer: dict[str, Any] = self._json("checkpoints", self._named(pipeline), *one, f"--last={last}")
        return answer

    def state(
        self, pipeline: str = "", operator: str = "", key: str = "", checkpoint: int | None = None, limit: int = KEYS
    ) -> list[Any]:
        """Show the operators that keep state, or the keys and states of one, at the newest checkpoint or another.

        *key* is written as it is, or in JSON: 7 finds the number and the text, '["ann", 1]' a tuple.
        """
        if operator and not _OPERATOR.fullmatch(operator):
            raise _refusal(f"{operator!r} is no operator's id: without one, the operators are listed.")
        words = [operator, f"--limit={limit}"] if operator else []
        words += [f"--key={key}"] if key else []
        words += [] if checkpoint is None else [f"--at={checkpoint}"]
        lines = _asked("state", "show", self._named(pipeline), *words, "--json", *self._cluster)
        return [msgspec.json.decode(line) for line in lines.splitlines()]

    def transactions(self, pipeline: str = "") -> list[Any]:
        """List output that waits: its age, the time left, whether it is decided, and what is to be done."""
        return list(self._json("transactions", "list", self._named(pipeline)))

    def doctor(self, pipeline: str = "") -> dict[str, Any]:
        """Find what is wrong around a pipeline; each finding says who has to act, and how."""
        answer: dict[str, Any] = self._json("doctor", self._named(pipeline))
        return answer

    def _named(self, pipeline: str) -> str:
        """The pipeline, which may be left out where there is only one."""
        if pipeline in self._pipelines:
            return pipeline
        if not pipeline and len(self._pipelines) == 1:
            return self._pipelines[0]
        raise _refusal(f"Name one of the pipelines: {', '.join(self._pipelines)}.")

    def _json(self, *command: str) -> Any:
        return msgspec.json.decode(_asked(*command, "--json", *self._cluster))


def _refusal(text: str) -> Exception:
    """An error that the client is shown as it is; of others it hears nothing."""
    from mcp.server.mcpserver.exceptions import ToolError

    return ToolError(text)


def _asked(*command: str) -> str:
    """What a command of exactlyonce prints; its error as an exception."""
    ended = subprocess.run(
        [sys.executable, "-m", "exactlyonce.cli.main", *command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    if ended.returncode and not ended.stdout:  # with findings, the doctor's code is not 0
        raise _refusal(ended.stderr.strip())
    return ended.stdout

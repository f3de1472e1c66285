"""`exactlyonce broker`: starts and stops a local Kafka. Progress goes to stderr; stdout is for scripts."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Parser, add_action, pair, port, set_command

_NOT_RUNNING = 1
_PORT = 9092

_EXAMPLES = """\
Start or stop a local Kafka, or show its status. It is reachable from this machine only.
It is downloaded once, needs Java 17 or newer, and keeps running after the command.

examples:
  exactlyonce broker start
  eval "$(exactlyonce broker start)"         and later commands find it
  exactlyonce broker start --port 0 --data-dir /tmp/kafka
                                             a second broker, on a free port
  exactlyonce broker start --set log.retention.hours=1
  exactlyonce broker status                  exit code 1 if it does not run
  exactlyonce broker stop                    its data stays
"""


def add(parser: Parser) -> None:
    usage = "start|stop|status [options]"
    set_command(parser, usage, _EXAMPLES, status)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    starting = add_action(actions, "start", "[options]", "start it; returns once it answers", "", start)
    stopping = add_action(actions, "stop", "[options]", "stop it; its data stays", "", stop)
    looking = add_action(actions, "status", "[options]", "show whether it runs, and where", "", status)
    for action in (starting, stopping, looking):
        action.add_argument(
            "--data-dir", metavar="DIR", type=Path, help="its folder (default: ~/.local/share/exactlyonce/broker)"
        )
    looking.add_argument("--json", action="store_true", help="as one JSON document")
    starting.add_argument(
        "--port", metavar="N", type=port, default=_PORT, help=f"its port (default: {_PORT}; 0: a free one)"
    )
    starting.add_argument(
        "--set",
        metavar="NAME=VALUE",
        type=pair,
        action="append",
        default=[],
        help="a setting of Kafka; may be repeated",
    )


def start(args: argparse.Namespace) -> int:
    """Start it, and print its address for other commands."""
    from exactlyonce.connectors.embedded.broker import EmbeddedBroker
    from exactlyonce.connectors.embedded.progress import told_on
    from exactlyonce.engines.configuration import BOOTSTRAP_VARIABLE

    broker = EmbeddedBroker(args.data_dir, args.port, dict(args.set))
    broker.start(told_on(sys.stderr))
    print(f"export {BOOTSTRAP_VARIABLE}={broker.bootstrap_servers}")
    return 0


def stop(args: argparse.Namespace) -> int:
    from exactlyonce.connectors.embedded.broker import EmbeddedBroker

    broker = EmbeddedBroker(args.data_dir)
    servers = broker.status().bootstrap_servers
    if servers is None:
        text.to_stderr(f"No broker runs on {broker.data_dir}.")
    else:
        broker.stop()
        text.to_stderr(f"The broker on {servers} has stopped; its data stays in {broker.data_dir}.")
    return 0


def status(args: argparse.Namespace) -> int:
    from exactlyonce.connectors.embedded.broker import EmbeddedBroker

    status = EmbeddedBroker(args.data_dir).status()
    if args.json:
        print(text.document({**asdict(status), "data_dir": str(status.data_dir)}))
        return 0 if status.running else _NOT_RUNNING
    print(f"running   {'yes' if status.running else 'no'}")
    if status.running:
        print(f"address   {status.bootstrap_servers}")
        print(f"process   {status.pid}")
    print(f"version   Kafka {status.version}")
    print(f"data      {status.data_dir}")
    return 0 if status.running else _NOT_RUNNING

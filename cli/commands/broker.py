"""`exactlyonce broker`: a Kafka of one's own. What takes long is told on stderr; stdout can be read by scripts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from exactlyonce.cli.arguments import Commands, add_command, pair, port

_NOT_RUNNING = 1
_PORT = 9092

_EXAMPLES = """\
Start, stop or look at a Kafka of your own, reachable from this machine only. It is
downloaded once, needs Java 17 or newer, and goes on after the command has returned.

examples:
  exactlyonce broker start
  eval "$(exactlyonce broker start)"         and later commands find it
  exactlyonce broker start --port 0 --data-dir /tmp/kafka
                                             another one, on a free port
  exactlyonce broker start --set log.retention.hours=1
  exactlyonce broker status                  exits with 1 if it does not run
  exactlyonce broker stop                    its data stays
"""


def add(commands: Commands) -> None:
    """The parser, and those of its actions."""
    usage, summary = "start|stop|status [options]", "start, stop or look at a Kafka on this machine"
    parser = add_command(commands, "broker", usage, summary, _EXAMPLES, status)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    starting = add_command(actions, "start", "[options]", "start it; returns once it answers", "", start)
    stopping = add_command(actions, "stop", "[options]", "stop it; its data stays", "", stop)
    looking = add_command(actions, "status", "[options]", "say whether it runs, and where", "", status)
    for action in (starting, stopping, looking):
        action.add_argument(
            "--data-dir", metavar="DIR", type=Path, help="its folder (default: ~/.local/share/exactlyonce/broker)"
        )
    starting.add_argument(
        "--port", metavar="N", type=port, default=_PORT, help=f"where it listens (default: {_PORT}; 0: a free port)"
    )
    starting.add_argument(
        "--set", metavar="NAME=VALUE", type=pair, action="append", default=[], help="a setting of Kafka, any number"
    )


def start(args: argparse.Namespace) -> int:
    """Start it, and print how other commands find it."""
    from exactlyonce.connectors.embedded.broker import EmbeddedBroker
    from exactlyonce.connectors.embedded.progress import told_on
    from exactlyonce.engines.configuration import BOOTSTRAP_VARIABLE

    broker = EmbeddedBroker(args.data_dir, args.port, dict(args.set))
    broker.start(told_on(sys.stderr))
    print(f"export {BOOTSTRAP_VARIABLE}={broker.bootstrap_servers}")
    return 0


def stop(args: argparse.Namespace) -> int:
    """Stop it, if it runs."""
    from exactlyonce.connectors.embedded.broker import EmbeddedBroker

    broker = EmbeddedBroker(args.data_dir)
    before = broker.status()
    if not before.running:
        _tell(f"No broker runs on {broker.data_dir}.")
        return 0
    broker.stop()
    _tell(f"The broker on {before.bootstrap_servers} has stopped; its data stays in {broker.data_dir}.")
    return 0


def status(args: argparse.Namespace) -> int:
    """Say whether it runs, and where."""
    from exactlyonce.connectors.embedded.broker import EmbeddedBroker

    found = EmbeddedBroker(args.data_dir).status()
    print(f"running   {'yes' if found.running else 'no'}")
    if found.running:
        print(f"address   {found.bootstrap_servers}")
        print(f"process   {found.pid}")
    print(f"version   Kafka {found.version}")
    print(f"data      {found.data_dir}")
    return 0 if found.running else _NOT_RUNNING


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

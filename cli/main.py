"""The `exactlyonce` command: runs a subcommand, and turns its exception into a message and an exit code.

Invariants: an error that a user can cause ends in one message without secrets and without a traceback, except that of
the user's own function. The module of a command is imported once the command is given, and its dependencies when it
runs: help is quick, and only `broker` needs Java.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module

from exactlyonce.cli.arguments import Actions, Parser, give_examples
from exactlyonce.cli.text import new_namespace, show_error
from exactlyonce.engines.stop_signals import imports_were_stopped
from exactlyonce.pipeline.errors import (
    BEFORE_ANYTHING_RAN,
    INTERRUPTED,
    EndedAtOnce,
    ExactlyOnceError,
    InvariantViolation,
    StoppedShort,
    UserError,
    UsersTraceback,
)

DEBUG_VARIABLE = "EXACTLYONCE_DEBUG"
READER_GONE = 128 + 13
"""The exit code that a shell reports after SIGPIPE."""

_EXAMPLES = """\
Exactly-once pipelines from Kafka to Kafka, in Python.

examples:
  exactlyonce demo                       watch a pipeline survive kills
  exactlyonce init totals                write a first pipeline
  exactlyonce broker start               run a local Kafka
  exactlyonce run orders:pipeline --bootstrap-servers 127.0.0.1:9092
                                         run `pipeline` of orders.py until Ctrl-C
  exactlyonce checkpoints order-totals   see its progress
"""
_EPILOG = f"""\
`exactlyonce COMMAND --help` shows examples of each command.

exit codes:
  0  a clean end
  1  an audit, a replay, a diff or the doctor has findings; or retries did not help
  2  something to correct: a setting, a topic, a store's table, the pipeline
  3  a record that cannot be decoded or processed
  4  no broker answers, or no store
  5  a newer instance of the pipeline took over
  6  a halt: going on would lose or double records; the message has the choices
  7  the outcome of a decision is unknown: run it again
  8  a broker answered with an unexpected error; the message names it
  9  stopped without a last checkpoint: nothing is lost, run it again
  10 an audit or a diff had nothing to compare
  70 a defect of exactlyonce
  130 ended by Ctrl-C or SIGTERM: at once, by a second one, or before the end of
      --until latest; nothing is lost, run it again

With {DEBUG_VARIABLE}=1 errors come with a traceback. With --json every line on stderr is
JSON, also the error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return READER_GONE


_TASKS: dict[str, dict[str, str]] = {
    "begin": {
        "demo": "watch a pipeline survive kills",
        "init": "write a first pipeline",
        "broker": "start or stop a Kafka on this machine",
        "completion": "complete commands in a shell",
    },
    "check before a run": {
        "explain": "check a pipeline and show its graph",
        "config": "show the settings of a run",
        "acls": "show the rights that a pipeline needs",
        "changes": "set up the capture of a table's changes",
        "diff": "compare the output of two versions",
    },
    "run and stop": {
        "run": "run a pipeline",
        "cancel": "end a run without a checkpoint",
        "savepoint": "take a savepoint",
        "savepoints": "list, verify and delete savepoints",
    },
    "watch": {
        "top": "show a pipeline in a terminal",
        "ui": "show pipelines in a browser",
        "checkpoints": "list checkpoints",
        "doctor": "find what is wrong",
        "mcp": "answer a client of MCP",
    },
    "state and history": {
        "state": "show or import the state of operators",
        "backfill": "compute history on Spark",
        "catch-up": "go on from a checkpoint on Spark",
    },
    "audit and repair": {
        "audit": "compare output with input",
        "replay": "compute output again",
        "dead-letters": "show records that could not be processed, send them back or discard them",
        "transactions": "list, describe, commit and abort waiting output",
        "reset": "delete the traces of a pipeline",
    },
}
"""The commands by task, each with its line, in the order of the help."""


@cache
def parser(word: str | None = None) -> Parser:
    """The parser of the command line. With *word*, its first word, only that command has arguments: the modules of the
    others are not imported."""
    root = Parser(prog="exactlyonce", usage="exactlyonce COMMAND ...", description=_EXAMPLES, epilog=_EPILOG)
    root.add_argument("--version", action=_Version, help="show the version, then exit")
    commands: Actions = root.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=root.prog)
    commands.by_task = {task: [*summaries] for task, summaries in _TASKS.items()}
    for summaries in _TASKS.values():
        for name, summary in summaries.items():
            command = commands.add_parser(name, help=summary)
            if word in (None, name):
                import_module(f"exactlyonce.cli.commands.{name.replace('-', '_')}").add(command)
                give_examples(command)
    root.set_defaults(whole=parser)
    return root


class _Version(argparse.Action):
    """Looks up the version only on request."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help, default=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        from exactlyonce.pipeline.extras import DISTRIBUTION

        print(f"exactlyonce {version(DISTRIBUTION)}")
        parser.exit()


def _run(argv: Sequence[str] | None) -> int:
    args = new_namespace()
    words = [*(sys.argv[1:] if argv is None else argv), ""]
    try:
        parser(words[0]).parse_args(argv, args)
        if imports_were_stopped():
            raise StoppedShort(BEFORE_ANYTHING_RAN) if words[0] == "run" else KeyboardInterrupt
        code: int = args.command(args)
    except EndedAtOnce as error:
        code = _failed(error, args)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a normal exit would wait for threads that wait for a broker
    except ExactlyOnceError as error:
        return _failed(error, args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            raise
        message = f"The operating system refused: {error}. {DEBUG_VARIABLE}=1 shows where."
        return _failed(UserError(message).with_traceback(error.__traceback__), args)
    except Exception as error:
        message = f"{type(error).__name__}: {error}. This is a defect of exactlyonce: please report it"
        return _failed(InvariantViolation(message).with_traceback(error.__traceback__), args)
    return code


def _failed(error: ExactlyOnceError, args: argparse.Namespace) -> int:
    traced = isinstance(error, InvariantViolation) or os.environ.get(DEBUG_VARIABLE) == "1"
    if traced:
        trace = "".join(traceback.format_exception(error))
    else:
        trace = str(error.__cause__.args[0]) if isinstance(error.__cause__, UsersTraceback) else ""
    show_error(args, error, trace)
    return error.exit_code


def _reader_gone() -> bool:
    """Whether our own output broke, for want of a reader, and not a connection to a broker or worker."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())

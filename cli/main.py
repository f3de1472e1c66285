"""The `exactlyonce` command: runs a subcommand, and turns its exception into a message and an exit code.

Invariants: an error that a user can cause ends in one message without secrets and without a traceback, except that of
the user's own function. Subcommands import their dependencies when they run, so that help is quick and only `broker`
needs Java.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from types import ModuleType

from exactlyonce.cli.arguments import Commands, Parser, give_examples
from exactlyonce.cli.commands import (
    acls,
    audit,
    backfill,
    broker,
    cancel,
    changes,
    checkpoints,
    completion,
    config,
    dead_letters,
    demo,
    diff,
    doctor,
    explain,
    init,
    mcp,
    replay,
    reset,
    run,
    savepoint,
    savepoints,
    state,
    top,
    transactions,
    ui,
)
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


@cache
def parser() -> Parser:
    root = Parser(prog="exactlyonce", usage="exactlyonce COMMAND ...", description=_EXAMPLES, epilog=_EPILOG)
    root.add_argument("--version", action=_Version, help="show the version, then exit")
    commands: Commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=root.prog)
    commands.by_task = {}
    for task, modules in _TASKS.items():
        before = [*commands.choices]
        for module in modules:
            module.add(commands)
        commands.by_task[task] = [name for name in commands.choices if name not in before]
    for command in commands.choices.values():
        give_examples(command)
    root.set_defaults(root=root)
    return root


_TASKS: dict[str, tuple[ModuleType, ...]] = {
    "begin": (demo, init, broker, completion),
    "check before a run": (explain, config, acls, changes, diff),
    "run and stop": (run, cancel, savepoint, savepoints),
    "watch": (top, ui, checkpoints, doctor, mcp),
    "state and history": (state, backfill),
    "audit and repair": (audit, replay, dead_letters, transactions, reset),
}
"""The commands by task, in the order of the help."""


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
    try:
        parser().parse_args(argv, args)
        if imports_were_stopped():
            raise StoppedShort(BEFORE_ANYTHING_RAN) if args.command is run.run else KeyboardInterrupt
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

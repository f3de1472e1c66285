"""`exactlyonce run`: runs a pipeline on this machine, until it is stopped or has read its inputs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.cli.arguments import Parser, add_cluster, add_pipeline, add_settings, given, loaded, named, set_command
from exactlyonce.engines.events import LEVELS
from exactlyonce.engines.options import Restoration, RunOptions, StateSettings
from exactlyonce.pipeline.errors import BEFORE_ANYTHING_RAN, StoppedShort
from exactlyonce.pipeline.settings import declared

_EXAMPLES = """\
Run a pipeline from its last checkpoint on. Ctrl-C and SIGTERM end it cleanly, with a last
checkpoint and no open transaction. A second one ends it at once. After a kill at any
instant, the next run goes on without losing or doubling a record.

examples:
  exactlyonce run orders:pipeline --bootstrap-servers 127.0.0.1:9092
  exactlyonce run orders:pipeline --until latest
  exactlyonce run orders:pipeline --checkpoint-interval 500ms --parallelism 2
  exactlyonce run orders:make --param region=eu --config production.toml
  exactlyonce run orders:pipeline --kafka security.protocol=SASL_SSL \\
      --kafka sasl.mechanism=PLAIN --kafka sasl.username=ann \\
      --kafka sasl.password=env:KAFKA_PASSWORD
  exactlyonce run orders:pipeline --from-savepoint /backups/order-totals-42-1f2e3d4c
  exactlyonce run orders:pipeline --restart fixed_delay:attempts=3,delay=1s
  exactlyonce run orders:pipeline --standby --ui 127.0.0.1:8080 --metrics 127.0.0.1:9100

In a terminal, a line on stderr shows the progress. Otherwise each checkpoint is a line of
JSON there; while nothing is read, one a minute. --log-format text writes plain lines
instead. Durations T are written 500ms, 1.5s, 10m or 1h.
"""
STOPPING = "stopping after a last checkpoint, if anything runs (ask again to end at once)"
ENDING_AT_ONCE = "ending at once, without a last checkpoint"


def add(parser: Parser) -> None:
    set_command(parser, "MODULE:PIPELINE [options]", _EXAMPLES, run)
    add_pipeline(parser)
    add_settings_of_run(parser)
    output = parser.add_argument_group("output, on stderr")
    add_settings(output, declared(RunOptions)["log_format"])
    output.add_argument("--json", action="store_true", help="the same as --log-format json")
    output.add_argument(
        "--log-level",
        metavar="LEVEL",
        choices=LEVELS,
        default="info",
        help="the lowest level shown: error, warning, info (the default) or debug: also each step of the protocol, "
        "and each checkpoint of a run that reads nothing",
    )
    output.add_argument("--verbose", action="store_true", help="the same as --log-format json --log-level debug")


def add_settings_of_run(parser: Parser) -> None:
    """The options of a run that a settings file may have, too, and the options of the cluster."""
    _add_running(parser)
    settings = declared(RunOptions)
    savepoints, checkpoints = parser.add_argument_group("savepoints"), parser.add_argument_group("checkpoints")
    add_settings(savepoints, *declared(Restoration).values(), settings["allow_dropped_fields"])
    add_settings(checkpoints, *declared(CheckpointSettings).values(), settings["checkpoint_partitions"])
    add_settings(parser.add_argument_group("state"), *declared(StateSettings).values())
    add_cluster(parser)
    add_settings(
        parser.add_argument_group("monitoring"),
        settings["ui"],
        settings["metrics"],
        settings["traces"],
        settings["serve"],
        settings["serve_token"],
    )


def _add_running(parser: Parser) -> None:
    settings = declared(RunOptions)
    first = ("until", "drain", "max_late", "standby", "broker_timeout_ms", "parallelism", "inline")
    add_settings(parser, *(settings[name] for name in first))
    parser.add_argument(
        "--restart",
        metavar="STRATEGY",
        type=restart,
        help="after failures: none, fixed_delay:attempts=N,delay=T, failure_rate:failures=N,window=T,delay=T or "
        "exponential_delay:initial=T,max=T (the default)",
    )
    add_settings(parser, *(settings[name] for name in ("accept_loss", "accept_new_output", "skip", "repair")))


def restart(text: str) -> dict[str, int | str]:
    """A restart strategy, from the command line.

    >>> restart("fixed_delay:attempts=3,delay=1s")
    {'strategy': 'fixed_delay', 'attempts': 3, 'delay': '1s'}
    """
    strategy, _, options = text.partition(":")
    pairs = [option.partition("=") for option in options.split(",") if option]
    if not strategy or not all(name and value for name, _, value in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: write it as fixed_delay:attempts=3,delay=1s")
    return {"strategy": strategy, **{name: int(value) if value.isdecimal() else value for name, _, value in pairs}}


def settings_given(args: argparse.Namespace) -> dict[str, Any]:
    """The options as `Pipeline.run` takes them; None: not given."""
    return given(args, RunOptions, Restoration, CheckpointSettings, StateSettings)


def run(args: argparse.Namespace) -> int:
    """Run until a clean end, or raise."""
    args.stopper = None
    try:
        return _run(args)
    except KeyboardInterrupt:
        if args.stopper is not None and args.stopper.has_begun:
            raise
        raise StoppedShort(BEFORE_ANYTHING_RAN) from None


def _run(args: argparse.Namespace) -> int:
    from exactlyonce.cli.text import show_from_handler
    from exactlyonce.connectors.kafka.errors import NotAuthorized
    from exactlyonce.engines import events
    from exactlyonce.engines.configuration import options_from
    from exactlyonce.engines.local.reporting import TerminalReporter, reporter_for
    from exactlyonce.engines.local.run import Stopper, run_loaded

    args.json = args.json or args.verbose
    level = "debug" if args.verbose else args.log_level
    options = options_from(settings_given(args) | ({"log_format": "json"} if args.json else {}))
    args.json = options.log_format == "json"
    args.redact = options.client.redact
    options.client.check()
    pipeline = loaded(args)
    name, reporter = pipeline.pipeline.name, reporter_for(options.log_format, level)
    in_terminal = isinstance(reporter, TerminalReporter)
    for warning in options.client.warnings:
        reporter.event(events.note(name, warning))

    def answer(again: bool) -> None:
        show_from_handler(reporter.line(events.note(name, ENDING_AT_ONCE if again else STOPPING)))

    args.stopper = Stopper(answer)
    try:
        manifest = run_loaded(pipeline, options, reporter, args.stopper)
    except NotAuthorized as error:
        from exactlyonce.views.doctor.examination import missing_rights

        lacking = [f"{right}." for right in missing_rights(options.client, pipeline.pipeline.build())]
        acls = f"`exactlyonce acls {named(args)} --principal User:NAME` prints what an administrator can run."
        raise NotAuthorized(" ".join([str(error), *lacking, acls])) from error
    if in_terminal and manifest is not None and level in ("debug", "info"):
        print(f"{name}: ended cleanly; the next run goes on from checkpoint {manifest.checkpoint}.", file=sys.stderr)
    return 0

"""The arguments that commands share: the look of their help, `name=value`, and the cluster.

Invariant: no message of a parser repeats the value of an argument that may hold a secret.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.secrets import is_reference

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.client_config import ClientConfig
    from exactlyonce.pipeline.graph import LogicalGraph
    from exactlyonce.pipeline.loading import Loaded

HELP_WIDTH_MAX = 100
_OPTION = re.compile(r"--\w[\w-]*")
_SECRET_NAME = re.compile("pass|pwd|secret|token|key|cred|auth|dsn|ur[il]", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"@|://|\w{32}")
"""Of an address with a login, or a token."""
_ALONE = ("-h", "--help", "--version")
"""Options that stand without a command."""
_DURATION: dict[str, Any] = {"metavar": "T"}
_COUNT: dict[str, Any] = {"metavar": "N", "type": int}
CHECKPOINTING: dict[str, tuple[dict[str, Any], str]] = {
    "mode": (
        {"choices": ("exactly_once", "at_least_once")},
        "at_least_once: no input is held back, and state may count records twice (default: exactly_once)",
    ),
    "unaligned": (
        {"action": "store_true", "default": None},
        "a barrier overtakes the records before it, which become part of the checkpoint",
    ),
    "aligned-timeout": (_DURATION, "with --unaligned: for how long a barrier waits before it overtakes (default: 0s)"),
    "checkpoint-interval": (_DURATION, "from one to the next (default: 1s)"),
    "checkpoint-timeout": (_DURATION, "one that takes longer is aborted (default: 1m)"),
    "deploy-timeout": (_DURATION, "workers that are not ready by then are replaced (default: 5m)"),
    "min-pause": (_DURATION, "from the end of one to the next (default: 0s)"),
    "max-concurrent": (_COUNT, "how many may be under way (default: 1)"),
    "tolerable-failed": (_COUNT, "failures in a row without a restart (default: 0)"),
    "num-retained": (_COUNT, "how many are kept (default: 3)"),
    "incremental": (
        {"action": argparse.BooleanOptionalAction},
        "hold what changed since the last one, or all state, each for itself (default: what changed)",
    ),
    "retention": (
        {"choices": ("retain_on_cancellation", "delete_on_cancellation")},
        "when the run is cancelled, they are kept or deleted (default: retain_on_cancellation)",
    ),
    "restart-budget": (_DURATION, "the longest that a restart takes (default: 1m)"),
    "store-timeout": (_DURATION, "how long a store that is away is waited for (default: 10m)"),
    "stop-timeout": (_DURATION, "asked to stop, it ends by then, with or without a last checkpoint (default: 30s)"),
    "transaction-timeout": (
        _DURATION,
        "the broker aborts a transaction that is open longer (default: the most it allows)",
    ),
    "checkpoint-storage": (
        {"metavar": "URL"},
        "where state is kept: /folder, hdfs://host:port/folder or s3://bucket/prefix (default: topic)",
    ),
    "checkpoint-partitions": (_COUNT, "of their topic, when it is created (default: 5)"),
}
"""What commands that take checkpoints are told of them. By option: what its value is, for the parser, and its help."""
KEEPING_STATE: dict[str, tuple[dict[str, Any], str]] = {
    "state-backend": (
        {"choices": ("hashmap", "rocksdb")},
        "hashmap: all in memory; rocksdb: a part of it, the rest in local files (default: hashmap)",
    ),
    "state-memory": ({"metavar": "SIZE"}, "what rocksdb lets a worker take, as 512mb (the default)"),
    "state-folder": ({"metavar": "PATH"}, "where rocksdb keeps local files (default: in the user's cache)"),
}
"""Where workers keep their state; likewise."""
RESTORING = ("from_savepoint", "map", "allow_dropped_state", "rewind", "allow_dropped_fields")
"""What says from which savepoint a run begins, and what of the state may be left behind."""
Command = Callable[[argparse.Namespace], int]
Commands = Any  # argparse's own type for it is private


class Parser(argparse.ArgumentParser):
    """Shows examples before options, takes no abbreviations, and names unknown arguments without their values."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_formatter, **options)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else [*args]
        if words and words[0].startswith("-") and words[0] not in _ALONE:  # the next word would be named as a command
            self.error(f"{_unrecognized(words[:1])}: options stand behind the command")
        known, unknown = self.parse_known_args(words, namespace)
        if unknown:
            parser: Parser = getattr(known, "parser", self)
            parser.error(_unrecognized(unknown) + parser.near(unknown))
        return known

    def near(self, words: Iterable[str]) -> str:
        """The options of this command that *words* may have meant, for a message; empty where none is like them."""
        own = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        given = [found[0] for each in words if (found := _OPTION.match(each))]
        meant = [close[0] for each in given if (close := get_close_matches(each, own, 1))]
        return f". Did you mean {' and '.join(meant)}?" if meant else ""


def _unrecognized(words: Iterable[str]) -> str:
    """What a message says of *words* that no parser takes: options by their names. Any other word may be the value of
    one, and so may what is written behind a name."""
    names = [found[0] for each in words if (found := _OPTION.match(each))]
    return f"unrecognized arguments: {' '.join(names) or 'words that belong to no option'}"


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(HELP_WIDTH_MAX, shutil.get_terminal_size().columns)
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=width)


def add_command(commands: Commands, name: str, usage: str, summary: str, text: str, command: Command) -> Parser:
    """The parser of one command; *summary* is its line in the list of commands, *text* stands before the options."""
    parser: Parser = commands.add_parser(name, usage=f"%(prog)s {usage}", help=summary, description=text)
    parser.set_defaults(command=command, parser=parser)
    return parser


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which pipeline is meant, and what it is made with."""
    parser.add_argument("pipeline", metavar="MODULE:PIPELINE", help="a pipeline, or a function that makes one")
    _add_parameters(parser)


def add_pipeline_name(parser: argparse.ArgumentParser) -> None:
    """The arguments that say whose traces are meant: those of a pipeline or of a sink of Spark; see `pipeline_name`."""
    help_text = "its name, its sinkId, module:pipeline or module:function"
    parser.add_argument("pipeline", metavar="PIPELINE", help=help_text)
    _add_parameters(parser)


def _add_parameters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--param",
        metavar="NAME=VALUE",
        type=pair,
        action="append",
        default=[],
        help="an argument of that function, any number of them",
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """The options that say which cluster is meant."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--bootstrap-servers",
        metavar="HOST:PORT",
        help="one or more brokers, separated by commas (default: $EXACTLYONCE_BOOTSTRAP_SERVERS)",
    )
    group.add_argument(
        "--kafka",
        metavar="NAME=VALUE",
        type=pair,
        action="append",
        default=[],
        help="a setting of librdkafka, any number of them; secrets as NAME=env:VARIABLE or NAME=file:PATH",
    )
    group.add_argument("--config", metavar="FILE", help="settings in TOML; what is given here wins over the file")


def add_checkpointing(group: argparse._ActionsContainer, names: Iterable[str]) -> None:
    """Those of `CHECKPOINTING` that are named."""
    for name in names:
        value, text = CHECKPOINTING[name]
        group.add_argument(f"--{name}", help=text, **value)


def add_state(group: argparse._ActionsContainer) -> None:
    """Those of `KEEPING_STATE`."""
    for name, (value, text) in KEEPING_STATE.items():
        group.add_argument(f"--{name}", help=text, **value)


def add_restoring(group: argparse._ActionsContainer) -> None:
    """Those of `RESTORING`."""
    group.add_argument(
        "--from-savepoint",
        metavar="N|URL",
        help="begin from savepoint N of the pipeline, or from one that was exported to URL; once, if it is repeated",
    )
    group.add_argument(
        "--map",
        metavar="OLD=NEW",
        type=pair,
        action="append",
        help="operator, source or loop OLD of the savepoint is NEW now, any number of them",
    )
    group.add_argument(
        "--allow-dropped-state",
        action="store_const",
        const=True,
        help="leave behind state and sources that the pipeline does not have any more",
    )
    group.add_argument(
        "--rewind",
        action="store_const",
        const=True,
        help="go back to savepoint N, though there are newer checkpoints: output since then is written again",
    )
    group.add_argument(
        "--allow-dropped-fields",
        action="store_const",
        const=True,
        help="leave behind fields of states that the code does not have, whatever they hold; also without a savepoint",
    )


def settings_of(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """What was given for options, by the names that `Pipeline.run` has for them, pairs as a dict; None: not given."""
    given = {name: getattr(args, name) for name in (each.replace("-", "_") for each in names)}
    return {name: dict(value) if name == "map" and value else value for name, value in given.items()}


def add_skip(parser: argparse._ActionsContainer) -> None:
    """The option that leaves out records."""
    parser.add_argument(
        "--skip",
        metavar="TOPIC:PARTITION:OFFSET",
        action="append",
        help="leave out a record of the input that an error has named, any number of them; checkpoints note it",
    )


def add_repair(parser: argparse._ActionsContainer) -> None:
    """The option that says how lost output is made again."""
    parser.add_argument(
        "--repair",
        choices=("local", "spark", "halt"),
        help="output that a decided checkpoint has lost, and that cannot be copied, is computed again from the input: "
        "in this process (local, the default), on Spark, or not at all (halt)",
    )


def port(text: str) -> int:
    """A TCP port, or 0."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: write a number from 0 to 65535")
    return number


def at_least_one(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, 1 or more")
    return int(text)


def pair(text: str) -> tuple[str, str]:
    """`name=value`, split.

    >>> pair("linger.ms=5")
    ('linger.ms', '5')
    """
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError("write it as NAME=VALUE")
    return name, value


def named(args: argparse.Namespace) -> str:
    """The pipeline as it was named, with its parameters, for a command to go on with.

    A value that may be a secret, by its parameter's name or its own form, is left out.

    >>> given = [("region", "eu west"), ("dsn", "postgres://u:secret@h/db")]
    >>> named(argparse.Namespace(pipeline="orders:make", param=given))
    "orders:make --param 'region=eu west' --param dsn=..."
    """
    shown = (shlex.quote(f"{name}={value}") if _is_harmless(name, value) else f"{shlex.quote(name)}=..."
             for name, value in args.param)  # fmt: skip
    return " ".join([args.pipeline, *(f"--param {each}" for each in shown)])


def _is_harmless(name: str, value: str) -> bool:
    return is_reference(value) or not (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))


def loaded(args: argparse.Namespace) -> Loaded:
    """The pipeline that was named as `module:attribute`; from here on *args* knows whom events are about."""
    from exactlyonce.pipeline.loading import load

    found = load(str(args.pipeline), dict(args.param))
    args.subject = found.pipeline.name
    return found


def pipeline_name(args: argparse.Namespace) -> str:
    """The name of the pipeline that the user means, by its name or as `module:attribute`; see `add_pipeline_name`."""
    from exactlyonce.pipeline.names import name_problem

    text = str(args.pipeline)
    if ":" in text:
        return loaded(args).pipeline.name
    if problem := name_problem(text):
        raise ConfigError(f"The name of a pipeline, {problem}. Give the name, or module:pipeline.")
    if args.param:
        raise ConfigError(f"--param is for a function that makes a pipeline, and {text} is a name. Leave it out.")
    args.subject = text
    return text


def name_and_graph(args: argparse.Namespace) -> tuple[str, LogicalGraph | None]:
    """The name of the pipeline that the user means, and its graph where its module was named."""
    if ":" not in str(args.pipeline):
        return pipeline_name(args), None
    graph = loaded(args).pipeline.build()
    return graph.pipeline_id, graph


def client(args: argparse.Namespace) -> ClientConfig:
    """How to reach the cluster that the options name; from here on *args* knows what to redact."""
    from exactlyonce.engines.configuration import client_from, read_file

    given = {"bootstrap_servers": args.bootstrap_servers, "kafka": dict(args.kafka)}
    config = client_from(given, read_file(args.config))
    args.redact = config.redact
    config.check()
    return config

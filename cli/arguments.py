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
from functools import partial
from typing import TYPE_CHECKING, Any

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.secrets import is_reference
from exactlyonce.pipeline.settings import COUNT, DURATION, FLAG, OTHER, SIZE, Declared, declared

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.client_config import ClientConfig
    from exactlyonce.pipeline.graph import LogicalGraph
    from exactlyonce.pipeline.loading import Loaded

HELP_WIDTH_MAX = 100
_OPTION = re.compile(r"--\w[\w-]*")
_SECRET_NAME = re.compile("pass|pwd|secret|token|key|cred|auth|dsn|ur[il]", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"@|://|\w{32}")
"""An address with a login, or a token."""
_ALONE = ("-h", "--help", "--version")
"""Options that stand without a command."""
_METAVARS = {DURATION: "T", COUNT: "N", SIZE: "SIZE"}
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


def add_settings(group: argparse._ActionsContainer, *settings: Declared) -> None:
    """An option for each of *settings*, as it is declared."""
    for each in settings:
        setting, kind, default = each.setting, each.setting.kind, each.default_text
        options: dict[str, Any]
        if kind == FLAG and not each.default and "(default: " not in setting.help:
            options = {"action": "store_const", "const": True}
        elif kind == FLAG:
            options = {"action": argparse.BooleanOptionalAction}
        elif kind == OTHER:
            options = {"metavar": setting.metavar}
            if each.default is not None and not isinstance(each.default, str):
                options |= {"action": "append", "type": pair if setting.metavar == "OLD=NEW" else str}
        else:
            metavar = setting.metavar or _METAVARS.get(kind, f"{{{','.join(setting.choices)}}}")
            options = {"metavar": metavar, "type": partial(_typed, each)}
        shown = "" if kind == FLAG or default == "none" else f" (default: {default})"
        group.add_argument(f"--{each.option}", dest=each.keyword, help=setting.help + shown, **options)


def _typed(setting: Declared, text: str) -> Any:
    """The value of *text*, in the words of `Pipeline.run`; what that refuses is refused in the same words."""
    try:
        return setting.read_text(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def given(args: argparse.Namespace, *owners: type) -> dict[str, Any]:
    """The values that were given for the settings of *owners* and for the cluster, as `Pipeline.run` takes them."""
    names = {each.keyword for owner in owners for each in declared(owner).values()}
    found = {name: getattr(args, name, None) for name in (*names, "bootstrap_servers", "config", "restart")}
    return found | {"map": dict(found.get("map") or {}) or None, "kafka": dict(args.kafka)}


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

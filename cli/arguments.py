"""The arguments that commands share: the format of their help, `name=value`, and the cluster.

Invariant: no message of a parser repeats the value of an argument that may hold a secret.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import nearest
from exactlyonce.pipeline.secrets import is_reference
from exactlyonce.pipeline.settings import COUNT, DURATION, FLAG, OTHER, SHARE, SIZE, Declared, declared

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
"""Options without a command."""
_METAVARS = {DURATION: "T", COUNT: "N", SIZE: "SIZE", SHARE: "SHARE"}
_COMMANDS_ELSEWHERE = {
    "check": "explain", "dlq": "dead-letters", "help": "--help", "kill": "cancel", "list": "checkpoints",
    "plan": "explain", "restore": "run --from-savepoint", "settings": "config show", "start": "run", "status": "top",
    "stop": "savepoint --stop", "validate": "explain", "version": "--version",
}  # fmt: skip
"""Names of commands in other tools, and what does that here."""
_OPTIONS_ELSEWHERE = {
    "--arg": ("--param",), "--broker": ("--bootstrap-servers",), "--brokers": ("--bootstrap-servers",),
    "--grep": ("--match",), "--interval": ("--checkpoint-interval",), "--properties": ("--config",),
    "--savepoint": ("--from-savepoint",), "--servers": ("--bootstrap-servers",), "--set": ("--param", "--kafka"),
    "--settings": ("--config",), "--since": ("--from",), "--start": ("--from",), "--stop-at": ("--to", "--until"),
    "--before": ("--to",), "--until": ("--to",), "--to": ("--until",), "--workers": ("--parallelism",),
    "--dry-run": ("--no-output",), "--limit": ("--last",),
}  # fmt: skip
"""Names of options in other tools or commands; the first one counts that the command has."""
_WORDS = "words without an option before them (a value with blanks needs quotes; dir/* is each file in dir)"
"""In place of words that no option is before, which may be secrets."""
Command = Callable[[argparse.Namespace], int]
Actions = Any  # argparse's own type for it is private


class Parser(argparse.ArgumentParser):
    """Shows examples before options, takes no abbreviations, and names unknown arguments without their values."""

    moved = ""
    """What is said beside an action or a word that the command does not have: how it is written."""

    def error(self, message: str) -> NoReturn:
        super().error(message + self.moved * ("invalid choice" in message or _WORDS in message))

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_formatter, **options)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else [*args]
        if words and words[0].startswith("-") and words[0] not in _ALONE:  # the next word would be named as a command
            self.error(f"{_unrecognized(words[:1])}: options go after the command")
        known, unknown = self.parse_known_args(words, namespace)
        if unknown:
            parser: Parser = getattr(known, "parser", self)
            parser.error(_unrecognized(unknown) + parser.near(unknown))
        return known

    def near(self, words: Iterable[str]) -> str:
        """A question for the message: did *words* mean similar options of this command? Empty without similar ones."""
        given = [match[0] for word in words if (match := _OPTION.match(word))]
        meant = [near for option in given if (near := self._near(option))]
        return f". Did you mean {' and '.join(meant)}?" if meant else ""

    def _near(self, given: str) -> str | None:
        """The option or the argument of this command that *given* means, if one is like it."""
        own = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        for option in _OPTIONS_ELSEWHERE.get(given, ()):
            if option in own:
                return option
        for action in self._actions:
            name = str(action.metavar or action.dest)
            if not action.option_strings and name.lower().endswith(given.removeprefix("--")):
                return f"{name}, written without {given}"
        return next((option for option in own if option.startswith(given)), None) or nearest(given, own)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a choice that there is not: argparse's message, with the one that was meant first."""
        choices = [*map(str, action.choices or ())]
        if not choices or value in choices:
            return
        text = f"invalid choice: {value!r}"
        elsewhere = _COMMANDS_ELSEWHERE.get(value) if "run" in choices else None
        near = elsewhere or nearest(str(value), choices)
        meant = f". Did you mean {near}?" if near else f" (choose from {', '.join(choices)})"
        raise argparse.ArgumentError(action, text + meant)


def _unrecognized(words: Iterable[str]) -> str:
    """The message about *words* that no parser takes: it names options only, for other words may be secret values."""
    names = [match[0] for word in words if (match := _OPTION.match(word))]
    return f"unrecognized arguments: {' '.join(names) or _WORDS}"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line ends, and lists commands by task where their action has `by_task`: names by task."""

    def _format_action(self, action: argparse.Action) -> str:
        by_task: dict[str, list[str]] = getattr(action, "by_task", {})
        if not by_task:
            return super()._format_action(action)
        below = action._get_subactions()  # type: ignore[attr-defined]  # as HelpFormatter
        commands, tasks = {command.dest: command for command in below}, []
        for task, names in by_task.items():
            self._indent()
            tasks.append(f"  {task}:\n" + "".join(self._format_action(commands[name]) for name in names))
            self._dedent()
        return "\n".join(tasks)


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(HELP_WIDTH_MAX, shutil.get_terminal_size().columns)
    return _Formatter(prog, max_help_position=34, width=width)


def set_command(parser: Parser, usage: str, text: str, command: Command) -> None:
    """Have *parser* call *command*; *text* precedes its options."""
    parser.usage, parser.description = f"%(prog)s {usage}", text
    parser.set_defaults(command=command, parser=parser)


def add_action(actions: Actions, name: str, usage: str, summary: str, text: str, command: Command) -> Parser:
    """The parser of one action of a command; *summary* is its line in the list of actions."""
    parser: Parser = actions.add_parser(name, help=summary)
    set_command(parser, usage, text, command)
    return parser


def give_examples(command: Parser) -> None:
    """Give each action of *command* without examples of its own the examples of *command* about it."""
    examples = (command.description or "").partition("examples:\n")[2].splitlines()
    for actions in command._actions:
        for action in actions.choices.values() if isinstance(actions.choices, dict) else ():
            if "examples:" not in (text := action.description or ""):
                own = [line for line in examples if line.startswith("  ") and action.prog in line]
                action.description = "\n".join([*([text] if text else []), "examples:", *own, ""])
            give_examples(action)


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """The pipeline, and the arguments of the function that makes it."""
    parser.add_argument("pipeline", metavar="MODULE:PIPELINE", help="a pipeline, or a function that returns one")
    _add_parameters(parser)


def add_pipeline_name(parser: argparse.ArgumentParser) -> None:
    """The name of a pipeline or of a Spark sink; see `pipeline_name`."""
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
        help="an argument of that function; may be repeated",
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
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
        help="a setting of librdkafka; may be repeated; secrets as NAME=env:VARIABLE or NAME=file:PATH",
    )
    group.add_argument("--config", metavar="FILE", help="settings in TOML; options win over the file")


def add_settings(group: argparse._ActionsContainer, *settings: Declared) -> None:
    """An option for each of *settings*."""
    for declaration in settings:
        setting, kind, default = declaration.setting, declaration.setting.kind, declaration.default_text
        options: dict[str, Any]
        if kind == FLAG and not declaration.default and "(default: " not in setting.help:
            options = {"action": "store_const", "const": True}
        elif kind == FLAG:
            options = {"action": argparse.BooleanOptionalAction}
        elif kind == OTHER:
            options = {"metavar": setting.metavar}
            if declaration.default is not None and not isinstance(declaration.default, str):
                options |= {"action": "append", "type": pair if setting.metavar == "OLD=NEW" else str}
        else:
            metavar = setting.metavar or _METAVARS.get(kind, f"{{{','.join(setting.choices)}}}")
            choices = setting.choices or None
            options = {"metavar": metavar, "type": partial(_typed, declaration), "choices": choices}
        shown = "" if kind == FLAG or default == "none" else f" (default: {default})"
        group.add_argument(f"--{declaration.option}", dest=declaration.keyword, help=setting.help + shown, **options)


def _typed(setting: Declared, text: str) -> Any:
    """The value of *text*, or the error that `Pipeline.run` would raise for it."""
    try:
        return setting.read_text(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def given(args: argparse.Namespace, *owners: type) -> dict[str, Any]:
    """The values that were given for the settings of *owners* and for the cluster, as `Pipeline.run` takes them."""
    names = {setting.keyword for owner in owners for setting in declared(owner).values()}
    values = {name: getattr(args, name, None) for name in (*names, "bootstrap_servers", "config", "restart")}
    return values | {"map": dict(values.get("map") or {}) or None, "kafka": dict(args.kafka)}


def port(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: write a number from 0 to 65535")
    return number


def at_least_one(text: str) -> int:
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
    """The pipeline with its parameters, as arguments of the next command. Values that may be secrets are left out.

    >>> given = [("region", "eu west"), ("dsn", "postgres://u:secret@h/db")]
    >>> named(argparse.Namespace(pipeline="orders:make", param=given))
    "orders:make --param 'region=eu west' --param dsn=..."
    """
    shown = (shlex.quote(f"{name}={value}") if _is_harmless(name, value) else f"{shlex.quote(name)}=..."
             for name, value in args.param)  # fmt: skip
    return " ".join([args.pipeline, *(f"--param {parameter}" for parameter in shown)])


_WITHOUT_PIPELINE = re.compile("(`exactlyonce (?:reset|changes setup|changes drop))`")


def with_pipeline(text: str, args: argparse.Namespace) -> str:
    """*text* of an error, with the pipeline in the commands that lack it.

    >>> with_pipeline("Or `exactlyonce reset`.", argparse.Namespace(pipeline="orders:make", param=[]))
    'Or `exactlyonce reset orders:make`.'
    """
    if ":" not in (getattr(args, "pipeline", None) or ""):
        return text
    return _WITHOUT_PIPELINE.sub(lambda command: f"{command[1]} {named(args)}`", text)


def _is_harmless(name: str, value: str) -> bool:
    return is_reference(value) or not (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))


def loaded(args: argparse.Namespace) -> Loaded:
    """The pipeline named as `module:attribute`; its name becomes the subject of events."""
    from exactlyonce.pipeline.loading import load

    pipeline = load(str(args.pipeline), dict(args.param))
    args.subject = pipeline.pipeline.name
    return pipeline


def pipeline_name(args: argparse.Namespace) -> str:
    """The name of the pipeline, which was given by its name or as `module:attribute`."""
    from exactlyonce.pipeline.names import name_problem

    text = str(args.pipeline)
    if ":" in text:
        return loaded(args).pipeline.name
    if problem := name_problem(text):
        raise ConfigError(f"The pipeline name {problem}. Give its name, or module:pipeline.")
    if args.param:
        raise ConfigError(
            f"--param is for a function that returns a pipeline; {text} is the name of one. Leave it out."
        )
    args.subject = text
    return text


def name_and_graph(args: argparse.Namespace) -> tuple[str, LogicalGraph | None]:
    """The name of the pipeline, and its graph if its module was given."""
    if ":" not in str(args.pipeline):
        return pipeline_name(args), None
    graph = loaded(args).pipeline.build()
    return graph.pipeline_id, graph


def client(args: argparse.Namespace) -> ClientConfig:
    """The checked configuration of the cluster; its secrets are redacted from now on."""
    from exactlyonce.engines.configuration import client_from, read_file

    given = {"bootstrap_servers": args.bootstrap_servers, "kafka": dict(args.kafka)}
    config = client_from(given, read_file(args.config))
    args.redact = config.redact
    config.check()
    return config

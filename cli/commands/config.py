"""`exactlyonce config show`: the settings that a run would have, and where each comes from. Opens no connection."""

from __future__ import annotations

import argparse

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Parser, add_action, set_command
from exactlyonce.cli.commands.run import add_settings_of_run, settings_given

_EXAMPLES = """\
Show settings as a run would have them.

examples:
  exactlyonce config show --config production.toml
"""
_SHOW = """\
Show each setting of a run with its value and its origin: the command line, the file of
--config, the environment, or the default. Secrets are hidden. It takes the options of
`exactlyonce run`, except for those of its output. Opens no connection.

examples:
  exactlyonce config show
  exactlyonce config show --config production.toml --parallelism 2
  exactlyonce config show --config production.toml --json
"""


def add(parser: Parser) -> None:
    set_command(parser, "show [options]", _EXAMPLES, show)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    usage = "[options of run]"
    showing = add_action(actions, "show", usage, "each setting, its value and its origin", _SHOW, show)
    showing.moved = ". It takes no pipeline: all have the same settings"
    add_settings_of_run(showing)
    for action in showing._actions:
        if not {"--help", "--config"} & {*action.option_strings}:
            action.help = argparse.SUPPRESS  # `exactlyonce run --help` has them
    showing.add_argument("--json", action="store_true", help="as one JSON document")


def show(args: argparse.Namespace) -> int:
    from exactlyonce.engines.configuration import effective_settings

    settings = effective_settings(settings_given(args))
    if args.json:
        print(text.document([setting._asdict() for setting in settings]))
    else:
        rows = [(f"[{setting.table}] {setting.key}", setting.value, setting.origin) for setting in settings]
        print("\n".join(text.table(("setting", "value", "origin"), rows)))
    return 0

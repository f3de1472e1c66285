"""`exactlyonce acls`: the rights that a pipeline needs, as commands of Kafka's tools. Opens no connection."""

from __future__ import annotations

import argparse

from exactlyonce.cli.arguments import Commands, add_command, add_pipeline, loaded
from exactlyonce.pipeline.errors import ConfigError

_EXAMPLES = """\
Print the rights that a pipeline needs on a cluster with access control, as commands for
an administrator. Opens no connection. `exactlyonce doctor` says which of them are missing.

examples:
  exactlyonce acls orders:pipeline --principal User:orders
  exactlyonce acls orders:pipeline --principal User:orders --no-create | sh

Stores beside Kafka have rights of their own: a run that lacks one ends at its start, and
names the GRANT.
"""
SERVERS = "$EXACTLYONCE_BOOTSTRAP_SERVERS"


def add(commands: Commands) -> None:
    usage, summary = "MODULE:PIPELINE --principal P [options]", "show the rights that a pipeline needs"
    parser = add_command(commands, "acls", usage, summary, _EXAMPLES, acls)
    add_pipeline(parser)
    parser.add_argument("--principal", metavar="P", required=True, help="who is to have them, as User:orders")
    servers = f"the brokers in the commands (default: {SERVERS})"
    parser.add_argument("--bootstrap-servers", metavar="HOST:PORT", default=SERVERS, help=servers)
    deletes = "also Delete, for `exactlyonce reset` and for a cancel that deletes checkpoints"
    parser.add_argument("--reset", action="store_true", help=deletes)
    parser.add_argument("--no-create", action="store_true", help="without Create: all topics are there already")


def acls(args: argparse.Namespace) -> int:
    from exactlyonce.views.rights import rights_of_graph

    if ":" not in args.principal:
        raise ConfigError(f"{args.principal!r} is no principal: write its type, too, as User:{args.principal}")
    for right in rights_of_graph(loaded(args).pipeline.build()):
        operations = [*right.operations]
        operations += ["Create"] if right.creates and not args.no_create else []
        operations += ["Delete"] if right.erased and args.reset else []
        print(right.command(args.bootstrap_servers, args.principal, operations))
    return 0

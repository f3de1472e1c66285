"""`exactlyonce acls`: the rights that a pipeline needs, as commands of tools. Opens no connection."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Parser, add_pipeline, loaded, set_command
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.views.rights import Right

_EXAMPLES = """\
Print the rights that a pipeline needs, as commands for an administrator: of Kafka's tools,
and of psql, mysql, redis-cli and aws for the stores that it reads or writes. psql and mysql
find their servers by their own settings; MYSQL_DATABASE names the database, REDIS_URL the
server. The user is there already. Opens no connection. `exactlyonce doctor` says which
rights are missing.

examples:
  exactlyonce acls orders:pipeline --principal User:orders
  exactlyonce acls orders:pipeline --principal User:orders --no-create | sh

A run that lacks one ends at once, and names it; without Read on the group it runs, and notes it.
"""
_USER = re.compile(r"[\w.@-]{1,63}")
"""Names that need no escape in any store."""
SERVERS = "$EXACTLYONCE_BOOTSTRAP_SERVERS"


def add(parser: Parser) -> None:
    usage = "MODULE:PIPELINE --principal P [options]"
    set_command(parser, usage, _EXAMPLES, acls)
    add_pipeline(parser)
    parser.add_argument("--principal", metavar="P", required=True, help="who is to have them, as User:orders")
    servers = f"the brokers in the commands (default: {SERVERS})"
    parser.add_argument("--bootstrap-servers", metavar="HOST:PORT", default=SERVERS, help=servers)
    deletes = "also Delete, for `exactlyonce reset` and for a cancel that deletes checkpoints"
    parser.add_argument("--reset", action="store_true", help=deletes)
    no_create = "without Create: all topics and tables are there already"
    parser.add_argument("--no-create", action="store_true", help=no_create)
    user = "the user's name in stores (default: that of P)"
    parser.add_argument("--user", metavar="NAME", help=user)
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def acls(args: argparse.Namespace) -> int:
    from exactlyonce.views.rights import grants_of_graph, rights_of_graph

    kind, colon, name = args.principal.partition(":")
    if not (kind and colon and name):
        raise ConfigError(f"{args.principal!r} is no principal: write its type, too, as User:{args.principal}")
    user = args.user or name
    if not _USER.fullmatch(user):
        raise ConfigError(f"{user!r} cannot be the name of a user in stores: give another one by --user.")
    graph = loaded(args).pipeline.build()
    kafka: list[tuple[Right, list[str]]] = []
    for right in rights_of_graph(graph):
        operations = [*right.operations]
        operations += ["Create"] if right.creates and not args.no_create else []
        operations += ["Delete"] if right.erased and args.reset else []
        kafka.append((right, operations))
    stores = [*grants_of_graph(graph, user, creates=not args.no_create)]
    if args.json:
        document = {
            "kafka": [
                right._asdict() | {"prefixed": right.prefixed, "operations": operations} for right, operations in kafka
            ],
            "stores": [{"node": node, **grants._asdict()} for node, grants in stores],
        }
        print(text.document(document))
        return 0
    for right, operations in kafka:
        print(right.command(args.bootstrap_servers, args.principal, operations))
    for node, grants in stores:
        print(f"# {node}: {grants.place}", f"{grants.command} <<'END'", *grants.statements, "END", sep="\n")
    return 0

"""`exactlyonce dead-letters`: shows the records that pipelines could not process, and sends them back, each once."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from exactlyonce.cli.arguments import Commands, add_cluster, add_command, at_least_one, client, given
from exactlyonce.cli.text import printable, table
from exactlyonce.pipeline.errors import ConfigError, Halt, TopicError
from exactlyonce.pipeline.names import as_name, name_problem
from exactlyonce.pipeline.sizes import counted

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import Manifest
    from exactlyonce.connectors.kafka.letters import Letter

_EXAMPLES = """\
Show the records that on_error=DeadLetters("TOPIC") has set aside, and why; or send them back
to the topics that they came from, once the reason is gone.

examples:
  exactlyonce dead-letters list orders-dead
  exactlyonce dead-letters list orders-dead --operator parse --json > letters.jsonl
  exactlyonce dead-letters show orders-dead 0:17
  exactlyonce dead-letters replay orders-dead
"""
_REPLAY = """\
Send the letters in TOPIC back to the topics that their records came from, each once: it is a
pipeline, whose checkpoints say where the next replay goes on. So a letter is sent back once,
whatever is killed, and however often the command runs; a record with several letters once, too.
The record keeps its partition and gets the time of the replay. A pipeline processes it whole:
where other branches had taken it before, they take it twice. Letters from behind an operator
with state or a loop have no input record, and those of files have no topic: they are left out.

examples:
  exactlyonce dead-letters replay orders-dead
"""
_LIMIT = 100
"""The letters of a table, unless told."""
_TEXT_LENGTH = 70


def add(commands: Commands) -> None:
    usage, summary = "list|show|replay TOPIC [options]", "show records that could not be processed, or send them back"
    parser = add_command(commands, "dead-letters", usage, summary, _EXAMPLES, list_letters)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    listing = add_command(actions, "list", "TOPIC [options]", "a line for each letter", "", list_letters)
    showing = add_command(actions, "show", "TOPIC PARTITION:OFFSET [options]", "one letter, whole", "", show)
    sending = add_command(actions, "replay", "TOPIC [options]", "send the letters back", _REPLAY, replay)
    for action in (listing, showing, sending):
        action.add_argument("topic", metavar="TOPIC", help="the topic of the letters")
    listing.add_argument("--operator", metavar="ID", help="those of this source, operator or sink only")
    listing.add_argument(
        "--limit", metavar="N", type=at_least_one, help=f"the most letters (default: all in JSON, {_LIMIT} in a table)"
    )
    showing.add_argument("place", metavar="PARTITION:OFFSET", help="the place of the letter in TOPIC, as list shows it")
    for action in (listing, showing):
        action.add_argument("--json", action="store_true", help="a line of JSON for each letter")
    sending.add_argument("--name", metavar="NAME", help="the name of the replay's checkpoints (default: by TOPIC)")
    for action in (listing, showing, sending):
        add_cluster(action)


def list_letters(args: argparse.Namespace) -> int:
    from exactlyonce.connectors.kafka.letters import letters_in

    letters = (
        letter for letter in letters_in(client(args), args.topic) if args.operator in (None, letter.reason.operator)
    )
    if args.json:
        for number, letter in enumerate(letters):
            if args.limit is not None and number == args.limit:
                break
            print(json.dumps(_facts(letter)))
        return 0
    print(*_table(args.topic, letters, args.limit or _LIMIT), sep="\n")
    return 0


def _table(topic: str, letters: Iterable[Letter], limit: int) -> Iterator[str]:
    rows: list[list[str]] = []
    by_reason = Counter[tuple[str, str]]()
    for letter in letters:
        reason = letter.reason
        by_reason[reason.operator, reason.error] += 1
        if len(rows) < limit:
            place = f"{letter.record.partition}:{letter.record.offset}"
            of_topic = f"{reason.topic}[{reason.partition}] {reason.offset}"
            source = f"{reason.upstream} {reason.time}" if reason.upstream else of_topic
            rows.append([place, reason.operator, source, f"{reason.error}: {_short(reason.message)}"])
    if not rows:
        yield f"There are no such dead letters in {topic}."
        return
    yield from table(("place", "operator", "record", "reason"), rows)
    shares = ", ".join(f"{operator} {error} {count:,}" for (operator, error), count in by_reason.most_common())
    yield f"{counted(by_reason.total(), 'dead letter')}: {shares}"


def _short(message: str) -> str:
    line = message.splitlines()[0] if message else ""
    return line if len(line) <= _TEXT_LENGTH else f"{line[:_TEXT_LENGTH]}..."


def show(args: argparse.Namespace) -> int:
    from exactlyonce.connectors.kafka.letters import letter_at

    partition, colon, offset = args.place.partition(":")
    if not (colon and partition.isdecimal() and offset.isdecimal()):
        raise ConfigError(f"{args.place!r} is no place: write PARTITION:OFFSET, as `dead-letters list` shows it.")
    letter = letter_at(client(args), args.topic, int(partition), int(offset))
    if args.json:
        print(json.dumps(_facts(letter)))
        return 0
    facts = {name: fact for name, fact in _facts(letter).items() if fact not in ("", None)}
    for name, fact in facts.items():
        lines = str(fact).splitlines() or [""]
        print(f"{name:<10}  {lines[0]}", *(f"{'':<12}{line}" for line in lines[1:]), sep="\n")
    return 0


def _facts(letter: Letter) -> dict[str, Any]:
    """The letter as JSON values: bytes that are no text as Python writes them."""
    record = letter.record
    headers = {name: printable(value) for name, value in record.headers}
    return {
        "place": f"{record.partition}:{record.offset}", **msgspec.structs.asdict(letter.reason),
        "key": printable(record.key), "value": printable(record.value), "headers": headers,
    }  # fmt: skip


def replay(args: argparse.Namespace) -> int:
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
    from exactlyonce.connectors.kafka.letters import letters_in
    from exactlyonce.engines.configuration import options_from
    from exactlyonce.engines.local.reporting import JsonReporter
    from exactlyonce.engines.local.run import Stopper, run_loaded
    from exactlyonce.pipeline.loading import load

    config, name = client(args), args.name or as_name(f"replay-{args.topic}")
    if problem := name_problem(name):
        raise ConfigError(f"The name {problem}: give another, with --name.")
    before: dict[int, int] = {}
    with suppress(TopicError):  # the first replay
        before = _positions(read_history(config, name).latest)
    letters = [
        letter
        for letter in letters_in(config, args.topic)
        if letter.record.offset >= before.get(letter.record.partition, 0)
    ]
    topics = sorted({letter.reason.topic for letter in letters if letter.reason.can_return})
    if not topics:
        print(f"{args.topic} has no dead letter with an input record of a topic that was not sent back before.")
        return 0
    params = {"name": name, "letters": args.topic, "topics": ",".join(topics)}
    options = options_from({**given(args), "until": "latest", "inline": True})
    pipeline = load("exactlyonce.sinks.kafka.letter_replay:replay", params)
    try:
        after = _positions(run_loaded(pipeline, options, JsonReporter(level="warning"), Stopper()))
    except Halt as error:
        raise Halt(
            f"The replay {name} cannot go on: {error}\n"
            f"  If retention has removed letters that were not sent back, go on with a replay of another name, by "
            f"--name. It begins at the first letter that is left, and sends those again that were sent before."
        ) from error
    done = [letter for letter in letters if letter.record.offset < after.get(letter.record.partition, 0)]
    sent = Counter(topic for topic, _, _ in {_place(letter) for letter in done if letter.reason.can_return})
    for topic, count in sorted(sent.items()):
        print(f"{counted(count, 'record')} sent back to {topic}.")
    if left := sum(not letter.reason.can_return for letter in done):
        print(
            f"{counted(left, 'dead letter')} left out: behind an operator with state or a loop they have no input "
            f"record, and records of files came from no topic. docs/pipelines.md, dead letters, says what to do with "
            f"them."
        )
    return 0


def _place(letter: Letter) -> tuple[str, int | None, int | None]:
    return letter.reason.topic, letter.reason.partition, letter.reason.offset


def _positions(manifest: Manifest | None) -> dict[int, int]:
    """The next offset by partition of the topic of letters."""
    return {} if manifest is None else {position.partition: position.offset for position in manifest.offsets}

"""`exactlyonce dead-letters`: shows the records that pipelines could not process; sends them back, or discards them."""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from exactlyonce.cli.arguments import Parser, add_action, add_cluster, at_least_one, client, set_command
from exactlyonce.cli.text import table
from exactlyonce.pipeline.errors import ConfigError, TopicError
from exactlyonce.pipeline.event_time import ms_of, shown_time
from exactlyonce.pipeline.positions import TIME, Positions
from exactlyonce.pipeline.sizes import counted

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.client_config import ClientConfig
    from exactlyonce.connectors.kafka.letters import Letter, Letters

_EXAMPLES = """\
Show the records that on_error=DeadLetters("TOPIC") has set aside, and why; send them back to
the topics that they came from, once the reason is gone; or discard them.

examples:
  exactlyonce dead-letters list orders-dead
  exactlyonce dead-letters list orders-dead --operator parse --json > letters.jsonl
  exactlyonce dead-letters show orders-dead 0:17
  exactlyonce dead-letters replay orders-dead --operator parse
  exactlyonce dead-letters discard orders-dead 0:17
"""
_REPLAY = """\
Send open letters in TOPIC back to the topics that their records came from, each once: the
transaction that sends them notes them as replayed, in topic TOPIC.states. So a letter is sent
back once, whatever is killed, and however often the command runs; a record with several
letters once, too. The record keeps its partition and gets the time of the replay. A pipeline
processes it whole: where other branches had taken it before, they take it twice. Letters from
behind an operator with state or a loop have no input record, those of files have no topic, and
records that a service has refused have no place in the input: they are left out. Where a
pipeline has event time, the command says how many records will be late, and asks; without a
terminal, --yes agrees beforehand.

examples:
  exactlyonce dead-letters replay orders-dead
  exactlyonce dead-letters replay orders-dead --match "KeyError: 'SEK'" --dry-run
  exactlyonce dead-letters show orders-dead 0:17 --json > letter.json
  exactlyonce dead-letters replay orders-dead --value letter.json
"""
_DISCARD = """\
Note open letters as discarded, in topic TOPIC.states: no replay sends them back. The letters
stay in TOPIC as long as its retention keeps them. Name them, or say --all.

examples:
  exactlyonce dead-letters discard orders-dead 0:17 2:3
  exactlyonce dead-letters discard orders-dead --operator parse --to 2026-11-01T00:00:00Z
"""
_LIMIT = 100
"""The letters of a table, unless told."""
_TEXT_LENGTH = 70


def add(parser: Parser) -> None:
    usage = "list|show|replay|discard TOPIC [options]"
    set_command(parser, usage, _EXAMPLES, list_letters)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    places = "TOPIC [PARTITION:OFFSET ...] [options]"
    listing = add_action(actions, "list", "TOPIC [options]", "a line for each letter", "", list_letters)
    showing = add_action(actions, "show", "TOPIC PARTITION:OFFSET [options]", "one letter, whole", "", show)
    sending = add_action(actions, "replay", places, "send open letters back", _REPLAY, replay)
    discarding = add_action(actions, "discard", places, "note open letters as discarded", _DISCARD, discard)
    every = listing, showing, sending, discarding
    for action in every:
        action.add_argument("topic", metavar="TOPIC", help="the topic of the letters")
    showing.add_argument("place", metavar="PARTITION:OFFSET", help="the place of the letter in TOPIC, as list shows it")
    for action in (sending, discarding):
        action.add_argument("places", metavar="PARTITION:OFFSET", nargs="*", help="these letters only")
    for action in (listing, sending, discarding):
        action.add_argument("--operator", metavar="ID", help="those of this source, operator or sink only")
        action.add_argument("--partition", metavar="N", type=int, help="those in this partition of TOPIC only")
        action.add_argument("--from", dest="since", metavar="TIME", type=_time, help="those written at TIME or later")
        action.add_argument("--to", dest="before", metavar="TIME", type=_time, help="those written before TIME")
        action.add_argument("--match", metavar="REGEX", type=_regex, help="those with it in their reason or value")
    listing.add_argument("--state", choices=("open", "replayed", "discarded"), help="those in this state only")
    listing.add_argument(
        "--limit", metavar="N", type=at_least_one, help=f"the most letters (default: all in JSON, {_LIMIT} in a table)"
    )
    sending.add_argument("--value", metavar="FILE", help="send these letters, edited: JSON as show --json writes it")
    discarding.add_argument("--all", action="store_true", help="all open letters")
    for action in (sending, discarding):
        action.add_argument("--dry-run", action="store_true", help="show the letters, and change nothing")
    sending.add_argument("--yes", action="store_true", help="do not ask")
    for action in (listing, showing):
        action.add_argument("--json", action="store_true", help="a line of JSON for each letter")
    for action in every:
        action.add_argument("--name", metavar="NAME", help="that of a replay by an earlier version, if it had one")
        add_cluster(action)


def _time(text: str) -> int:
    try:
        return ms_of(Positions("the time", (TIME,)).read(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _letters(args: argparse.Namespace) -> Letters:
    from exactlyonce.connectors.kafka.letters import Letters

    return Letters(client(args), args.topic, args.name or "")


def _selected(args: argparse.Namespace, letters: Iterable[Letter]) -> Iterator[Letter]:
    """The *letters* that the options name."""
    places = {_place(text) for text in getattr(args, "places", ())}
    for letter in letters:
        record, reason = letter.record, letter.reason
        written_ms = record.timestamp_ms or 0
        texts = f"{reason.error}: {reason.message}", (record.value or b"").decode(errors="replace")
        if (
            (not places or letter.place in places)
            and args.operator in (None, reason.operator)
            and args.partition in (None, record.partition)
            and (args.since is None or written_ms >= args.since)
            and (args.before is None or written_ms < args.before)
            and (args.match is None or any(map(args.match.search, texts)))
        ):
            yield letter


def _place(text: str) -> str:
    partition, colon, offset = text.partition(":")
    if not (colon and partition.isdecimal() and offset.isdecimal()):
        raise ConfigError(f"{text!r} is no place: write PARTITION:OFFSET, as `dead-letters list` shows it.")
    return f"{int(partition)}:{int(offset)}"


# --- showing ----------------------------------------------------------------------------------------------------------


def list_letters(args: argparse.Namespace) -> int:
    letters = (letter for letter in _selected(args, _letters(args).all()) if args.state in (None, letter.state))
    if args.json:
        for number, letter in enumerate(letters):
            if args.limit is not None and number == args.limit:
                break
            print(json.dumps(_facts(letter)))
        return 0
    print(*_table(args.topic, letters, args.limit or _LIMIT), sep="\n")
    return 0


def _table(topic: str, letters: Iterable[Letter], limit: int = _LIMIT) -> Iterator[str]:
    rows: list[list[str]] = []
    by_reason, by_state = Counter[tuple[str, str]](), Counter[str]()
    for letter in letters:
        reason = letter.reason
        by_reason[reason.operator, reason.error] += 1
        by_state[letter.state] += 1
        if len(rows) < limit:
            of_topic = f"{reason.topic}[{reason.partition}] {reason.offset}" if reason.topic else "in the letter"
            source = f"{reason.upstream} {reason.time}" if reason.upstream else of_topic
            shown = f"{reason.error}: {_short(reason.message)}"
            rows.append([letter.place, letter.state, reason.operator, source, shown])
    if not rows:
        yield f"There are no such dead letters in {topic}."
        return
    yield from table(("place", "state", "operator", "record", "reason"), rows)
    states = ", ".join(f"{count:,} {state}" for state, count in by_state.most_common())
    shares = ", ".join(f"{operator} {error} {count:,}" for (operator, error), count in by_reason.most_common())
    yield f"{counted(by_reason.total(), 'dead letter')}, {states}: {shares}"


def _short(message: str) -> str:
    line = message.splitlines()[0] if message else ""
    return line if len(line) <= _TEXT_LENGTH else f"{line[:_TEXT_LENGTH]}..."


def show(args: argparse.Namespace) -> int:
    letter = _letters(args).at(_place(args.place))
    if args.json:
        print(json.dumps(_facts(letter)))
        return 0
    record = letter.record
    facts = {"place": letter.place, "state": letter.state, **msgspec.structs.asdict(letter.reason)}
    facts |= {"key": _shown(record.key), "value": _shown(record.value)}
    facts |= {"headers": "\n".join(f"{name}: {_shown(value)}" for name, value in record.headers)}
    facts = {name: fact for name, fact in facts.items() if fact not in ("", None)}
    for name, fact in facts.items():
        lines = str(fact).splitlines() or [""]
        print(f"{name:<10}  {lines[0]}", *(f"{'':<12}{line}" for line in lines[1:]), sep="\n")
    return 0


def _shown(data: bytes | None) -> str | None:
    text = _as_json(data)
    return f"base64 {text['base64']}" if isinstance(text, dict) else text


def _as_json(data: bytes | None) -> Any:
    """*data* as text where it is UTF-8, else in base64; None stays None.

    >>> _as_json(b"ann"), _as_json(b"\\xff")
    ('ann', {'base64': '/w=='})
    """
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _from_json(value: Any) -> bytes | None:
    """The inverse of `_as_json`; ValueError for anything else."""
    if isinstance(value, dict) and value.keys() == {"base64"}:
        return base64.b64decode(value["base64"], validate=True)
    if value is not None and not isinstance(value, str):
        raise ValueError(f'{value!r:.100} is neither a text, nor null, nor {{"base64": "..."}}')
    return None if value is None else value.encode()


def _facts(letter: Letter) -> dict[str, Any]:
    """The letter as JSON values."""
    record = letter.record
    return {
        "place": letter.place, "state": letter.state, **msgspec.structs.asdict(letter.reason),
        "key": _as_json(record.key), "value": _as_json(record.value),
        "headers": [[name, _as_json(value)] for name, value in record.headers],
    }  # fmt: skip


# --- ending -----------------------------------------------------------------------------------------------------------


def _has_none(letters: Letters) -> bool:
    """Whether the topic has no letters, which is said: then no topic of their states is created."""
    if next(iter(letters.all()), None) is not None:
        return False
    print(f"{letters.topic} has no dead letters: is it their topic? Nothing was changed.")
    return True


def replay(args: argparse.Namespace) -> int:
    from exactlyonce.connectors.kafka.letters import OPEN, REPLAYED

    letters = _letters(args)
    edited = {} if args.value is None else _edited(args.value)
    if args.dry_run:
        print(*_table(args.topic, _returning(args, [*letters.all()], edited)), sep="\n")
        return 0
    if _has_none(letters):
        return 0
    ending = letters.ending()
    known = [*letters.all()]
    chosen = _returning(args, known, edited)
    if not chosen:
        print(f"{args.topic} has no such open dead letter with an input record of a topic.")
    elif not args.yes and (warning := _lateness(letters.config, chosen)) and not _agreed(warning):
        return 1
    sent = ending.end(chosen, REPLAYED, letters.replayed)
    for topic, count in sorted(sent.items()):
        print(f"{counted(count, 'record')} sent back to {topic}.")
    if more := len(chosen) - sent.total():
        print(f"{counted(more, 'dead letter')} of records that were sent back before, with another letter.")
    kept = [letter.reason for letter in _selected(args, known) if letter.state == OPEN and not letter.reason.can_return]
    refused = sum(not reason.has_place for reason in kept)
    left = len(kept) - refused
    if refused and not edited:
        print(
            f"{counted(refused, 'dead letter')} left out: a service has refused {'it' if refused == 1 else 'them'} "
            f"after the checkpoint, when a record has no place in the input any more. Send each again by hand: "
            f"`dead-letters show {args.topic} PARTITION:OFFSET` has the record, the answer and the Idempotency-Key. "
            f"Then discard the letter."
        )
    if left and not edited:
        print(
            f"{counted(left, 'dead letter')} left out: behind an operator with state or a loop they have no input "
            f"record, and records of files and of tables came from no topic. docs/pipelines.md, dead letters, says "
            f"what to do with them."
        )
    return 0


def _returning(args: argparse.Namespace, known: Sequence[Letter], edited: Mapping[str, Any]) -> list[Letter]:
    """The open letters to send back; `ConfigError` for one that was named and cannot be."""
    candidates = [letter for letter in _open(args, known, edited) if letter.place in edited or not edited]
    for letter in candidates:
        if not letter.reason.can_return and letter.place in {*edited, *map(_place, args.places)}:
            text = f"The letter at {args.topic} {letter.place} has no input record of a topic."
            by_hand = " A service has refused its record: send that again by hand, and discard the letter."
            raise ConfigError(text if letter.reason.has_place else text + by_hand)
    return [
        letter._replace(edited=_with(letter, edited.get(letter.place)))
        for letter in candidates
        if letter.reason.can_return
    ]


def _open(args: argparse.Namespace, known: Sequence[Letter], named: Iterable[str] = ()) -> list[Letter]:
    """The open letters that the options name; `ConfigError` for a place, of theirs or *named*, without one."""
    from exactlyonce.connectors.kafka.letters import OPEN

    states = {letter.place: letter.state for letter in known}
    for place in (*named, *map(_place, args.places)):
        if (state := states.get(place)) != OPEN:
            why = "There is no dead letter" if state is None else f"The letter is {state} already"
            raise ConfigError(f"{why} at {args.topic} {place}. Nothing was changed.")
    return [letter for letter in _selected(args, known) if letter.state == OPEN]


def _with(letter: Letter, facts: Any) -> Any:
    """The record of *letter*, edited to *facts*; None: it is sent as it is."""
    if facts is None:
        return None
    try:
        key, value = _from_json(facts["key"]), _from_json(facts["value"])
        headers = tuple((str(name), _from_json(header)) for name, header in facts["headers"])
        free = {"key", "value", "headers", "state"}
        known = json.loads(json.dumps(_facts(letter)))
        changed = [name for name, fact in known.items() if name not in free and facts.get(name, fact) != fact]
    except KeyError as error:
        raise ConfigError(f"--value: the letter at {letter.place} lacks {error}.") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--value: the letter at {letter.place} has a wrong key, value or header: {error}. Each is a text, null, "
            f"or, where it is no text, as show --json writes it."
        ) from None
    if changed:
        raise ConfigError(
            f"--value: the letter at {letter.place} has another {changed[0]}. A letter is sent back to where it came "
            f"from: change its key, value and headers alone."
        )
    return msgspec.structs.replace(letter.record, key=key, value=value, headers=headers)


def _edited(path: str) -> dict[str, Any]:
    """The letters of file *path*, by place: one at least, since none would stand for all."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        letters, decoder, at = list[Any](), json.JSONDecoder(), 0
        while rest := text[at:].lstrip():
            letter, length = decoder.raw_decode(rest)
            letters += letter if isinstance(letter, list) else [letter]
            at = len(text) - len(rest) + length
        edited = {_place(letter["place"]): letter for letter in letters}
    except OSError as error:
        raise ConfigError(f"The file {path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"The file {path} is no JSON of letters: write an object for each, as `dead-letters show --json` does."
        ) from None
    if not edited:
        raise ConfigError(
            f"The file {path} has no letters, so nothing was sent. Write it by `dead-letters show --json`."
        )
    return edited


def _lateness(config: ClientConfig, letters: Iterable[Letter]) -> str:
    """How many of *letters* their pipelines would take for late, in words; empty: none has event time."""
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history

    by_pipeline: dict[str, list[Letter]] = {}
    for letter in letters:
        by_pipeline.setdefault(letter.reason.pipeline, []).append(letter)
    warnings = []
    for pipeline, own in by_pipeline.items():
        try:
            newest = read_history(config, pipeline).latest
        except TopicError:
            continue
        if newest is None:
            continue
        floors = {
            (at.topic, at.partition): newest.late_up_to(at)
            for at in (position.in_cluster or position for position in newest.offsets)
        }
        places = [(letter, floors.get((letter.reason.topic, letter.reason.partition or 0))) for letter in own]
        timed = [(letter.reason.event_time, floor) for letter, floor in places if floor is not None]
        late = sum(time is not None and time <= floor for time, floor in timed)
        unknown = sum(time is None for time, _ in timed)
        if late or unknown:
            last = shown_time(max(floor for _, floor in timed))
            more = f", and {unknown:,} may, for their letters have no time" if unknown else ""
            warnings.append(
                f"Pipeline {pipeline} has event time, and has read up to {last}. Of {counted(len(own), 'record')}, "
                f"{late:,} would come late{more}. Late records count where lateness= of a window takes them, go to "
                f"late= where there is one, and are left out elsewhere."
            )
    return "\n".join(warnings)


def _agreed(warning: str) -> bool:
    print(warning, file=sys.stderr)
    if not sys.stdin.isatty():
        raise ConfigError("Nothing was sent: there is no terminal to ask on. Add --yes to agree beforehand.")
    try:
        return input("Send them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def discard(args: argparse.Namespace) -> int:
    from exactlyonce.connectors.kafka.letters import DISCARDED

    narrowed = (args.operator, args.partition, args.since, args.before, args.match)
    if not (args.places or args.all or any(given is not None for given in narrowed)):
        options = "--operator, --partition, --from, --to, --match or --all"
        raise ConfigError(f"Nothing was discarded: say which letters, by PARTITION:OFFSET, {options}.")
    letters = _letters(args)
    if _has_none(letters):
        return 0
    ending = None if args.dry_run else letters.ending()
    chosen = _open(args, [*letters.all()])
    if ending is None:
        print(*_table(args.topic, chosen), sep="\n")
        return 0
    ending.end(chosen, DISCARDED)
    print(f"{counted(len(chosen), 'dead letter')} of {args.topic} discarded.")
    return 0

"""The judge of captured changes: the messages of a topic against an audit of the table, as plain data.

It shares no code with the pipeline. A trigger has written a line of the audit for each change of a row, numbered by a
sequence while the row was locked: so the lines of a key are in the order of its commits. No two changes have the same
version of a row. A topic has, for each key, a state of it from the row's page, and then exactly its later changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

SHOWN = 12
"""The texts about one topic that are shown."""


class Audited(NamedTuple):
    """A change of a row, as the trigger saw it."""

    number: int
    """By the sequence."""
    key: str
    version: int | None
    """That of the row; None: it was deleted."""
    amount: int
    transaction: int


class Said(NamedTuple):
    """A message of a topic."""

    key: str
    version: int | None
    """None: a null value."""
    op: str = "update"
    lsn: int = 0
    """The position of the commit."""


def judge(audit: Sequence[Audited], messages: Sequence[Said], paged: int, total: int | None = None) -> list[str]:
    """The differences between a topic and its table; none if each change is there once, in order.

    *paged*: a number of the audit after the last page was read, from which on nothing may be left to a page. *total*:
    the sum of amounts after each transaction; None: it is not constant.
    """
    history: dict[str, list[Audited]] = {}
    for line in audit:
        history.setdefault(line.key, []).append(line)
    found: dict[str, list[Said]] = {}
    for said in messages:
        found.setdefault(said.key, []).append(said)
    wrong: list[str] = []
    for key in {**history, **found}:
        wrong += _differences(key, history.get(key, []), found.get(key, []), paged)
    if not wrong:
        wrong += _torn(history, messages, paged, total)
    return [*wrong[:SHOWN], *([f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else [])]


def _differences(key: str, lines: Sequence[Audited], found: Sequence[Said], paged: int) -> Iterator[str]:
    """A text unless the messages of *key* are a state of it and then its later changes."""
    versions = [line.version for line in lines]
    if not found:
        unread = [line.version for line in lines if line.number > paged]
        if unread or (versions and versions[-1] is not None):
            yield f"key {key} is lost: {_shown(versions)} were committed, and there is no message"
        return
    first, said = found[0], [message.version for message in found]
    if first.version is None or first.version not in versions:
        yield f"key {key} begins with {first.version}, which is no state of it: {_shown(said)} of {_shown(versions)}"
        return
    start = versions.index(first.version)
    expected, before = versions[start:], lines[:start]
    if unread := [line.version for line in before if line.number > paged]:
        yield f"key {key} lacks {_shown(unread)}, committed after all pages were read"
    elif said != expected:
        lost, more = Counter(expected) - Counter(said), Counter(said) - Counter(expected)
        kinds = [f"lost {[*lost.elements()]}"] if lost else []
        kinds += [f"doubled or not committed {[*more.elements()]}"] if more else []
        yield f"key {key}: {', '.join(kinds) or 'out of order'}: {_shown(said)} and not {_shown(expected)}"
    elif first.op not in ("read", "insert") or (first.op == "insert" and before and before[-1].version is not None):
        yield f"key {key} begins with the {first.op} to {first.version}: what it was before is lost"
    elif "read" in [message.op for message in found[1:]]:
        yield f"key {key} is read again by a page: {_shown(said)}"


def _shown(versions: Sequence[int | None]) -> str:
    return str([*versions]) if len(versions) <= 40 else f"{[*versions[:20]]} ... {[*versions[-20:]]}"


def _torn(
    history: Mapping[str, Sequence[Audited]], messages: Sequence[Said], paged: int, total: int | None
) -> Iterator[str]:
    """Transactions that are not in the order of their commits, or not together, or do not leave the sum as it was."""
    last = 0
    for said in messages:
        if said.op != "read":
            if said.lsn < last:
                yield f"the change of {said.key} to {said.version}, committed at {said.lsn}, comes after {last}"
            last = max(said.lsn, last)
    lines = _lines_of(history, messages)
    first_of: dict[int, int] = {}
    for line in (line for changes in history.values() for line in changes):
        first_of[line.transaction] = min(line.number, first_of.get(line.transaction, line.number))
    ended: set[int] = set()
    amounts: dict[str, int] = {}
    sum_now, is_whole = 0, False
    for transaction, changes in groupby(lines, lambda line: line.transaction):
        if first_of[transaction] > paged:
            is_whole = True
            if transaction in ended:
                yield f"transaction {transaction} comes in parts, with others between them"
        for line in changes:
            sum_now -= amounts.pop(line.key, 0)
            if line.version is not None:
                amounts[line.key] = line.amount
                sum_now += line.amount
        ended.add(transaction)
        if is_whole and total is not None and sum_now != total:
            yield f"after transaction {transaction} the sum is {sum_now} and not {total}"


def _lines_of(history: Mapping[str, Sequence[Audited]], messages: Sequence[Said]) -> list[Audited]:
    """The line of the audit of each message; each key has its lines in order."""
    places: dict[str, int] = {}
    lines: list[Audited] = []
    for said in messages:
        if said.key in places:
            places[said.key] += 1
        else:
            places[said.key] = [line.version for line in history[said.key]].index(said.version)
        lines.append(history[said.key][places[said.key]])
    return lines


def newest(messages: Sequence[Said]) -> dict[str, int]:
    """The topic as a table: the version of each row."""
    rows = {said.key: said.version for said in messages}
    return {key: version for key, version in rows.items() if version is not None}


MUTANTS = ("lose", "double", "swap")


def mutated(messages: Sequence[Said], mutant: str) -> list[Said]:
    """*messages* with a fault: one is lost, doubled, or swapped with the one before it of its key."""
    changed, last = [*messages], dict[str, int]()
    for place in range(len(messages) // 2, len(messages)):
        before = last.get(messages[place].key)
        if before is not None:
            break
        last[messages[place].key] = place
    else:
        raise ValueError("no key has two messages in the second half")
    if mutant == "lose":
        del changed[before]
    elif mutant == "double":
        changed.insert(before, changed[before])
    else:
        changed[place], changed[before] = changed[before], changed[place]
    return changed

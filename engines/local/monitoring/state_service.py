"""The state of a pipeline by key over HTTP, for a run and for `exactlyonce state serve`.

    GET /state/OPERATOR/KEY                      the state of one key
    GET /state/OPERATOR?key=KEY&key=KEY          the states of several, all at one checkpoint
    GET /state/OPERATOR?from=KEY&to=KEY&limit=N  the first N states by key; without from and to, of all keys

Every answer is JSON with the number of its checkpoint. A KEY is written as for `exactlyonce state show --key`.
"""

from __future__ import annotations

import heapq
import hmac
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import lru_cache
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import unquote

from exactlyonce.engines.local.monitoring.server import is_loopback
from exactlyonce.engines.local.monitoring.serving import Answer, Asked, AtOnce, Paths
from exactlyonce.engines.options import listening_at
from exactlyonce.engines.savepoints.contents import decoded, possible_keys
from exactlyonce.engines.savepoints.shown_state import KeyView, TimedKeyView
from exactlyonce.engines.savepoints.state_reader import LOOK_S, AtHand, Found, NotAtHand, StateReader
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.secrets import is_reference, look_up
from exactlyonce.state.state_type import json_text

LIMIT = 1_000
"""The most states in an answer, and what it is without ``limit``."""
WAIT = "5s"
"""How long a request waits for its ``min_checkpoint``: shorter than a client has."""
_PARAMETERS = {"key", "from", "to", "limit", "min_checkpoint"}


def token_for(address: str, reference: str, name: str) -> str | None:
    """The token at *reference*, of the setting *name*; ConfigError without one for an *address* beyond this machine."""
    host, _ = listening_at(address)
    if reference and not is_reference(reference):
        raise ConfigError(f"{name} names the place of the token: write env:NAME or file:/path.")
    if not reference and not is_loopback(host):
        raise ConfigError(
            f"{address} is beyond this machine, and whoever reaches it could read all state. Give a token, as "
            f"{name} env:STATE_TOKEN, or listen at a port of 127.0.0.1."
        )
    return look_up(name, reference) if reference else None


States = StateReader | AtHand
"""What is asked: the reader itself, or what is at hand of it."""


class Refused(Exception):
    """A request that is not answered as asked."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class StateService:
    """Answers from *reader*; with a *token* only requests that have it, as ``Authorization: Bearer TOKEN``."""

    def __init__(self, reader: StateReader, token: str | None = None) -> None:
        self._reader, self._token = reader, token
        self._scanning = Lock()
        """Of the one request that reads all keys."""

    @contextmanager
    def following(self) -> Iterator[Paths]:
        """What answers, while a thread looks for checkpoints, so that no request has to."""
        ended = Event()

        def follow() -> None:
            while not ended.wait(LOOK_S):
                with suppress(ExactlyOnceError):  # the next request meets it, and says so
                    self._reader.look()

        thread = Thread(target=follow, name="state", daemon=True)
        thread.start()
        try:
            yield {"/state/*": AtOnce(self._at_once, self._waiting)}
        finally:
            ended.set()
            thread.join()

    def _at_once(self, asked: Asked) -> Answer | None:
        try:
            return self._answer(asked, AtHand(self._reader))
        except NotAtHand:
            return None

    def _waiting(self, asked: Asked) -> Answer:
        return self._answer(asked, self._reader)

    def _answer(self, asked: Asked, states: States) -> Answer:
        try:
            return _json(self._answered(asked, states))
        except Refused as refused:
            return _json({"error": str(refused)}, refused.status)
        except ConfigError as error:  # no such operator, no checkpoint yet
            return _json({"error": str(error)}, 404)
        except TimeoutError as error:
            return _json({"error": str(error)}, 504)
        except ExactlyOnceError as error:
            return _json({"error": str(error)}, 503)

    def _answered(self, asked: Asked, states: States) -> dict[str, Any]:
        if self._token is not None and not _is(asked.authorization, f"Bearer {self._token}"):
            raise Refused(401, "A token is needed: the header Authorization: Bearer TOKEN.")
        operator, *key = map(unquote, asked.path.removeprefix("/state/").split("/", 1))
        given = defaultdict[str, list[str]](list)
        for name, value in asked.query:
            given[name].append(value)
        if unknown := given.keys() - _PARAMETERS:
            known = ", ".join(sorted(_PARAMETERS))
            raise Refused(400, f"There is no parameter {', '.join(sorted(unknown))}: there are {known}.")
        states.reach(_number(given, "min_checkpoint", 0), WAIT)
        if key:
            return _one(states, operator, key[0])
        if "key" in given:
            found = states.find(operator, [_key(states, operator, text) for text in given["key"]])
            return {**_head(found), "states": list(map(_shown, found.states))}
        return self._range(states, operator, given)

    def _range(self, states: States, operator: str, given: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """The first states by key."""
        limit = _number(given, "limit", LIMIT)
        if not 0 < limit <= LIMIT:
            raise Refused(400, f"limit is from 1 to {LIMIT}, not {limit}.")
        first, last = (
            _place(decoded(_key(states, operator, given[name][0]))) if name in given else None
            for name in ("from", "to")
        )
        if not self._scanning.acquire(blocking=False):
            raise Refused(503, "Another request reads all keys, and one may at a time. Ask again.")
        try:
            return _first(states, operator, limit, first, last)
        finally:
            self._scanning.release()


def _one(states: States, operator: str, text: str) -> dict[str, Any]:
    found = states.find(operator, [_key(states, operator, text)])
    if not found.states:
        raise Refused(404, f"{text} has no state of {operator!r} at checkpoint {found.checkpoint}.")
    if found.timed:
        return {**_head(found), "key": found.states[0].key, "states": list(map(_slot, found.states))}
    return {**_head(found), **_shown(found.states[0])}


def _first(states: States, operator: str, limit: int, first: Any, last: Any) -> dict[str, Any]:
    """The *limit* states with the least places from *first* to *last*, None for any."""
    smallest: list[tuple[Any, int, KeyView]] = []
    head: dict[str, Any] = {}
    count = 0
    for found in states.scan(operator):
        if head != _head(found):  # the first; or blocks expired: all anew
            if head:
                return _first(states, operator, limit, first, last)
            head = _head(found)
        inside = [(_place(view.key), count + number, view) for number, view in enumerate(found.states)]
        count += len(found.states)
        chosen = [each for each in inside if (first is None or each[0] >= first) and (last is None or each[0] <= last)]
        smallest = heapq.nsmallest(limit, [*smallest, *chosen])
    return {**head, "states": [_shown(view) for _, _, view in smallest]}


def _place(key: Any) -> Any:
    """Where *key* stands among others: numbers, then texts, then all others; tuples by their parts.

    >>> sorted(["b", 10, "ann", -2, ("a", 2), ("a", 1)], key=_place)
    [-2, 10, 'ann', 'b', ('a', 1), ('a', 2)]
    """
    match key:
        case bool() | int() | float():
            return 0, key
        case str():
            return 1, key
        case list() | tuple():
            return 2, *map(_place, key)
        case _:
            return 3, canonical_key(key)


def _key(states: States, operator: str, text: str) -> bytes:
    """The key that *text* means; refused if it is none of the operator's type, or could be two."""
    try:
        keys = possible_keys(text)
    except ConfigError as error:
        raise Refused(400, str(error)) from None
    known = states.keys(operator)
    if not (keys := set(filter(known.may_have, keys))):
        raise Refused(400, f"{text} is no key of {operator!r}: its keys are {known.schema}, written in JSON.")
    if len(keys) > 1:
        keys = {key for key in keys if states.find(operator, [key]).states} or {min(keys)}
    if len(keys) > 1:
        raise Refused(400, f"{text} is two keys of {operator!r}, a text and a value: write the text in quotes.")
    return next(iter(keys))


def _json(document: Any, status: int = 200) -> Answer:
    return Answer(f"{json_text(document)}\n".encode(), "application/json", status)


@lru_cache(maxsize=8)
def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")


def _head(found: Found) -> dict[str, Any]:
    return {
        "pipeline": found.pipeline, "operator": found.operator, "checkpoint": found.checkpoint,
        "completed_at": _moment(found.completed_at_ms),
    }  # fmt: skip


def _shown(view: KeyView) -> dict[str, Any]:
    return {"key": view.key, **_slot(view)}


def _slot(view: KeyView) -> dict[str, Any]:
    times = {"start": view.start, "end": view.end} if isinstance(view, TimedKeyView) else {}
    return {**times, "state": view.state}


def _number(given: Mapping[str, Sequence[str]], name: str, default: int) -> int:
    text = given.get(name, [str(default)])[0]
    if not text.isdecimal() or len(text) > 18:
        raise Refused(400, f"{name} is a number, not {text!r}.")
    return int(text)


def _is(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("latin-1"), wanted.encode())  # the bytes that came

"""EDN, the notation of Clojure and of Jepsen's histories: as much of it as a history needs.

| EDN | Python |
| --- | --- |
| `:keyword` | `Keyword("keyword")`, a str |
| `"text"`, `12`, `1.5`, `nil`, `true` | str, int, float, None, bool |
| `[1 2]`, `(1 2)` | a tuple, so that it can be a key |
| `{:a 1}`, `#{1 2}` | dict, frozenset |

A tag, as in `#jepsen.history.Op{...}`, is dropped. Nothing here is the product's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|;[^\n]*|#\{|[\[\](){}]|[^\s,"\[\](){};]+')
ENDS = {"[": "]", "(": ")", "{": "}", "#{": "}"}
ATOMS = {"nil": None, "true": True, "false": False}


class Keyword(str):
    """A keyword, without its colon."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f":{self}"


class NotEdn(ValueError):
    """The text is no EDN, or has a form that histories do not use."""


def written(value: Any) -> str:
    """*value* as EDN, on one line."""
    if isinstance(value, Keyword):
        return f":{value}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return "nil" if value is None else json.dumps(value)  # their notation is JSON's
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)} {written(item)}" for key, item in value.items()) + "}"
    return "[" + " ".join(map(written, value)) + "]"


def read(text: str) -> list[Any]:
    """The forms of *text*, one after the other. Raises `NotEdn`."""
    forms: list[Any] = []
    stack: list[tuple[str, list[Any]]] = []
    items = forms
    for token in TOKEN.findall(text):
        if token in ENDS:
            stack.append((token, items))
            items = []
        elif token in ("]", ")", "}"):
            if not stack or ENDS[stack[-1][0]] != token:
                raise NotEdn(f"{token} ends nothing in {text[:200]}")
            opened, outer = stack.pop()
            outer.append(_collection(opened, items))
            items = outer
        elif token[0] != ";" and (token[0] != "#" or token == "#_"):
            items.append(_atom(token))
    if stack:
        raise NotEdn(f"{stack[-1][0]} is not ended in {text[:200]}")
    return forms


def _collection(opened: str, items: list[Any]) -> Any:
    if opened == "{":
        if len(items) % 2:
            raise NotEdn(f"a map has a key without a value: {items}")
        return dict(zip(items[::2], items[1::2], strict=True))
    return frozenset(items) if opened == "#{" else tuple(items)


def _atom(token: str) -> Any:
    if token[0] == ":":
        return Keyword(token[1:])
    if token[0] == '"':
        return json.loads(token)
    if token in ATOMS:
        return ATOMS[token]
    try:
        return float(token) if any(letter in token for letter in ".eE") else int(token.removesuffix("N"))
    except ValueError:
        raise NotEdn(f"{token} is not read here") from None


def lines(values: Iterable[Any]) -> str:
    """A value a line."""
    return "".join(f"{written(value)}\n" for value in values)

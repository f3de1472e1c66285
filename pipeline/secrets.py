"""Secrets by reference: `env:NAME` and `file:/path` stand for what a variable or a file holds.

A reference is looked up each time a client is made, so that a changed secret is taken up by the next one, and it
travels to other processes as the reference.
"""

from __future__ import annotations

import os
from pathlib import Path

from exactlyonce.pipeline.errors import ConfigError


class Secret(str):
    """A secret on its way to a client library. Its repr hides it: libraries log the arguments that they are given."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def is_reference(value: str) -> bool:
    """Whether *value* says where a secret is, and is none itself.

    >>> is_reference("env:PASSWORD"), is_reference("hunter2")
    (True, False)
    """
    return value.startswith(("env:", "file:"))


def look_up(name: str, value: str) -> str:
    """What *value*, the setting *name*, refers to, or itself if it is no reference."""
    kind, _, target = value.partition(":")
    if kind == "env":
        if target not in os.environ:
            raise ConfigError(f"{name} is {value}, but the environment has no variable {target}. Export it.")
        return os.environ[target]
    if kind == "file":
        try:
            return Path(target).read_text().rstrip("\r\n")
        except OSError as error:
            raise ConfigError(f"{name} is {value}, which cannot be read: {error.strerror}.") from None
    return value

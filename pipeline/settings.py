"""The declaration of a setting, once, with its field. Pure.

The command line, the settings file, the keyword arguments of `Pipeline.run`, the checks and the tables of
docs/settings.md follow from it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import msgspec

from exactlyonce.pipeline.durations import duration_ms, written_duration
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import setting as setting_named
from exactlyonce.pipeline.sizes import byte_count, written_size

DURATION, COUNT, SIZE, SHARE = "duration", "count", "size", "share"
FLAG, CHOICE, TEXT, OTHER = "flag", "choice", "text", "other"
"""The form of a value: "500ms", 3, "512mb", 0.5; true, one of some words, any text, or one of its reader."""
_TYPES = {DURATION: "Duration", COUNT: "int", SIZE: "Size", SHARE: "float", FLAG: "bool", TEXT: "str"}


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting, beside its field's name, type and default."""

    kind: str
    help: str
    """The help of the command line, without the default."""
    flink: str = ""
    """Flink's name for docs/settings.md; empty if there is none."""
    minimum: int = 0
    """In milliseconds for durations, in bytes for sizes."""
    choices: tuple[str, ...] = ()
    reader: Callable[[str], str] = str
    """Converts a text to the field's value, or raises `ConfigError`."""
    default: str = ""
    """The default in words, if they tell more than the value."""
    key: str = ""
    """The name in a file; empty: the field's name, without its unit."""
    keyword: str = ""
    """The name in Python and, with dashes, on the command line; empty: `key`."""
    in_file: bool = True
    """Whether a settings file may have it."""
    metavar: str = ""
    """The value's placeholder in the help; empty: a word for its kind."""
    type: str = ""
    """The type of a value of `OTHER` in Python."""


@dataclass(frozen=True)
class Declared:
    """A setting with its field."""

    field: str
    default: Any
    setting: Setting

    @property
    def key(self) -> str:
        return self.setting.key or self.field.removesuffix("_ms").removesuffix("_bytes")

    @property
    def keyword(self) -> str:
        return self.setting.keyword or self.key

    @property
    def option(self) -> str:
        """The name on the command line, without leading dashes."""
        return self.keyword.replace("_", "-")

    @property
    def type(self) -> str:
        """The type of its keyword argument."""
        setting = self.setting
        if setting.kind == CHOICE:
            return f"Literal[{', '.join(json.dumps(choice) for choice in setting.choices)}]"
        return setting.type or _TYPES[setting.kind]

    @property
    def named(self) -> str:
        return setting_named(self.keyword)

    @property
    def default_text(self) -> str:
        """The default as in a settings file."""
        return self.setting.default or self.written(self.default)

    def written(self, value: Any) -> str:
        """The field's *value* as in a settings file."""
        kind = self.setting.kind
        if kind == FLAG:
            return "on" if value else "off"
        if value is None:
            return "none"
        if isinstance(value, Mapping):
            return ", ".join(f"{name}={other}" for name, other in value.items())
        if isinstance(value, tuple):
            return ", ".join(map(str, value))
        return written_duration(value) if kind == DURATION else written_size(value) if kind == SIZE else str(value)

    def read(self, value: Any) -> Any:
        """The field's value from one of Python or of a file; ConfigError for another kind."""
        match self.setting.kind:
            case "duration":
                return duration_ms(value, self.named)
            case "size":
                return byte_count(value, self.named)
            case "count":
                return whole_number(value, self.named)
            case "share":
                return share(value, self.named)
            case "flag" if not isinstance(value, bool):
                raise ConfigError(f"{self.named} is {value!r}: write true or false.")
            case "text" | "choice":
                return self.setting.reader(str(value))
        return value

    def read_text(self, text: str) -> Any:
        """A value for `read`, from the command line; ConfigError if it is out of bounds."""
        is_number = self.setting.kind == COUNT and text.lstrip("-").isdecimal()
        value = int(text) if is_number else text
        self.check(self.read(value))
        return value

    def check(self, value: Any) -> None:
        """ConfigError if the field's value is out of bounds."""
        setting = self.setting
        if setting.choices and value not in setting.choices:
            raise ConfigError(f"{self.named} is {value!r}: choose one of {', '.join(setting.choices)}.")
        if setting.kind in (DURATION, COUNT, SIZE) and value is not None and value < setting.minimum:
            write = {DURATION: written_duration, SIZE: written_size}.get(setting.kind, str)
            raise ConfigError(f"{self.named} is {write(value)}: it must be at least {write(setting.minimum)}.")


def whole_number(value: Any, name: str) -> int:
    """*value*, if it is a whole number; else a ConfigError about the setting *name*."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: write a whole number.")
    return value


def share(value: Any, name: str) -> float:
    """*value*, if it is a share; else a ConfigError about the setting *name*.

    >>> share("0.25", "max_late")
    0.25
    """
    try:
        given = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        given = -1.0
    if not 0 <= given <= 1:
        raise ConfigError(f"{name} is {value!r}: write a share from 0 to 1, as 0.01 for one in a hundred.")
    return given


@cache
def declared(owner: type) -> dict[str, Declared]:
    """The settings among the fields of *owner*, a Struct or a dataclass, by field."""
    if dataclasses.is_dataclass(owner):
        fields = [(field.name, field.default, field.metadata.get("setting")) for field in dataclasses.fields(owner)]
    else:
        annotations = [(field.name, field.default, get_args(field.type)) for field in msgspec.structs.fields(owner)]
        fields = [
            (name, default, next((annotation for annotation in found if isinstance(annotation, Setting)), None))
            for name, default, found in annotations
        ]
    return {name: Declared(name, default, setting) for name, default, setting in fields if setting is not None}


def check_bounds(holder: object) -> None:
    """ConfigError if a field of *holder* is out of its setting's bounds."""
    owner: Any = type(holder)
    for field, setting in declared(owner).items():
        setting.check(getattr(holder, field))

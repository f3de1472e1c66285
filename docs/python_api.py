"""The public Python API as Markdown, from signatures and docstrings, which are Markdown themselves."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any, is_typeddict

MODULES = tuple(
    f"exactlyonce{module}"
    for module in ("", ".connectors", ".sinks", ".errors", ".savepoints", ".spark", ".testing", ".views")
)
WIDTH = 100


def reference() -> str:
    """A section for each module of `MODULES`, with an entry for each name of its `__all__` that is in none before."""
    entries: dict[int, str] = {}
    return "\n".join(line for name in MODULES for line in _module(importlib.import_module(name), entries))


def _module(module: ModuleType, entries: dict[int, str]) -> Iterator[str]:
    """The section of *module*; *entries* are the names so far, by what they name."""
    yield f"\n## {module.__name__}\n"
    for name in sorted(module.__all__, key=str.lower):
        target = getattr(module, name)
        if entries.setdefault(id(target), module.__name__) == module.__name__:
            yield from _entry(target, name)


def _entry(target: Any, name: str) -> Iterator[str]:
    yield f"\n### {name}\n"
    if is_typeddict(target):
        keys = "".join(f"\n    {key}: {_type(of.__forward_arg__)}" for key, of in target.__annotations__.items())
        yield from _fence(f"class {name}(TypedDict):{keys}")
        yield from _text(target)
    elif inspect.isclass(target):
        yield from _fence(f"class {name}{'' if issubclass(target, Exception) else _parameters(target)}")
        yield from _text(target)
        for member_name, member in vars(target).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if not member_name.startswith("_") and inspect.isfunction(function) and function.__doc__:
                yield from _fence(f"{name}.{member_name}{_parameters(function)}")
                yield from _text(function)
    elif callable(target):
        yield from _fence(f"{name}{_parameters(target)}")
        yield from _text(target)
    else:
        yield from _fence(f"{name} = {target!r}")


def _parameters(target: Any) -> str:
    """The parameters, on one line if they fit."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return "(...)"
    shown = [part for part in _shown(signature) if part not in ("self", "cls")]
    result = "" if inspect.isclass(target) or signature.return_annotation is inspect.Signature.empty else (
        f" -> {_type(signature.return_annotation)}"
    )  # fmt: skip
    line = f"({', '.join(shown)}){result}"
    return line if len(line) < WIDTH else "(\n" + "".join(f"    {part},\n" for part in shown) + f"){result}"


def _shown(signature: inspect.Signature) -> Iterator[str]:
    keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            yield "*"
        keyword_only = keyword_only or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
        annotation = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
        default = parameter.default
        given = "" if default is parameter.empty else f" = {default!r}" if _is_plain(default) else " = ..."
        yield f"{stars}{parameter.name}{annotation}{given}"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | tuple)


def _type(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _fence(code: str) -> Iterator[str]:
    yield f"\n```python\n{code}\n```\n"


def _text(target: Any) -> Iterator[str]:
    """The docstring; lines of examples in it, with their output, become fences."""
    text = inspect.cleandoc(target.__doc__ or "")
    yield re.sub(r"^>>> .*(?:\n\S.*)*", lambda match: f"\n```python\n{match[0]}\n```\n", text, flags=re.MULTILINE)

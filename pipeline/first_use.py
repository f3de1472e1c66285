"""Names of a package that are imported on first use, so that a process starts with those alone that it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(namespace: dict[str, Any], root: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of the package with this *namespace*; *modules* of the package *root*, by name.

    >>> on_first_use({"__name__": "shop"}, "exactlyonce", {"nearest": "pipeline.names"})("nearest").__name__
    'nearest'
    """

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(f"{root}.{modules[name]}"), name)
        return value

    return attribute

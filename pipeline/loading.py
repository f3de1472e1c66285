"""Loading a pipeline by its name, the same in every process. Pipelines are imported, never pickled.

A reference is JSON from which `load_reference` makes the same pipeline in another process. The sender adds the graph's
fingerprint, for a comparison.

A cell of a notebook under ``%%pipeline NAME`` becomes a module, which worker processes can import. The module's name
ends with a digest of the cell, so that no process that has imported an older text of the cell takes that for the newer.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from exactlyonce.pipeline import hints, shape
from exactlyonce.pipeline.errors import ConfigError, GraphError, UserError, users_errors
from exactlyonce.pipeline.location import caller, raised_at
from exactlyonce.pipeline.names import nearest
from exactlyonce.pipeline.stream import Pipeline

Reference = dict[str, object]

_INLINE = "run(inline=True) runs everything in this process instead"
_importing: ContextVar[str | None] = ContextVar("importing", default=None)
_here: dict[int, Pipeline] = {}
"""The pipelines of this process that cannot be imported, by `id`."""


@dataclass(frozen=True)
class Loaded:
    """A pipeline, and its reference for other processes."""

    pipeline: Pipeline
    reference: Reference


def load(target: str, params: Mapping[str, str] | None = None) -> Loaded:
    """The pipeline ``module:attribute``, where attribute is a pipeline or a function of *params* that returns one.

    The working directory is searched first. Raises `ConfigError` or `GraphError`.
    """
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(
            f"{target!r} names no pipeline: write module:attribute, as orders:pipeline. Only commands that take "
            f"PIPELINE, such as checkpoints, savepoint, state and reset, accept a name or the sinkId of a Spark sink"
        )
    if module.endswith(".py") or "/" in module:
        name = module.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigError(f"{module!r} is a file: name it as a module, {name}:{attribute}")
    reference: Reference = {
        "module": module, "attribute": attribute, "params": dict(params or {}), "path": str(Path.cwd())
    }  # fmt: skip
    pipeline = load_reference(reference)
    return Loaded(pipeline, {**reference, "path": str(_folder_of(sys.modules[module]))})


def _folder_of(module: ModuleType) -> Path:
    """The folder in which another process finds *module*: the working directory, unless it was found elsewhere and is
    not installed."""
    here, scope = Path.cwd(), vars(module)
    found = PathFinder.find_spec(module.__name__.partition(".")[0], [str(here)])
    if scope.get("__file__") is None or (found is not None and found.origin is not None):
        return here
    folder = _module_name(scope)[1]
    installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")}
    return here if folder in installed else folder


def load_reference(reference: Mapping[str, Any]) -> Pipeline:
    """The pipeline of a reference of `load` or `inline`, here or in another process."""
    if (number := reference.get("here")) is not None:
        if number in _here:
            return _here[number]
        raise ConfigError("the pipeline of another process cannot be imported")
    module, attribute = str(reference["module"]), str(reference["attribute"])
    found = import_module(module, str(reference["path"]))
    if not hasattr(found, attribute):
        names, likely = _pipelines(vars(found)), _likely_functions(vars(found), attribute)
        near = nearest(attribute, [*names, *likely])
        meant = f" (did you mean {near!r}?)" if near else ""
        there = ", ".join(names) or "none"
        if likely:
            there += f"; functions that may return one, though they do not say `-> Pipeline`: {', '.join(likely)}"
        raise ConfigError(
            f"module {module!r} has no {attribute!r}{meant}; its pipelines, and functions that return one: {there}"
        )
    return _made(f"{module}:{attribute}", getattr(found, attribute), reference["params"])


def inline(pipeline: Pipeline) -> Loaded:
    """*pipeline*, for this process alone."""
    _here[id(pipeline)] = pipeline
    return Loaded(pipeline, {"here": id(pipeline)})


def resolved(pipeline: Pipeline | str, params: Mapping[str, str] | None = None) -> Loaded:
    """The pipeline that a program gives, or names as `load` reads it; *params* are for a named function."""
    if not isinstance(pipeline, Pipeline | str):
        raise ConfigError(f"{pipeline!r:.100} is no pipeline: give one, or its name as 'module:attribute'.")
    if params is not None and not all(isinstance(text, str) for pair in dict(params).items() for text in pair):
        raise ConfigError(f"params={params!r:.200} must be a dict of texts, as for --param.")
    if isinstance(pipeline, str):
        return load(pipeline, params)
    if params:
        raise ConfigError(
            f"params= are for a function that is named as 'module:function', and this is the pipeline "
            f"{pipeline.name!r}: leave them out."
        )
    return importable(pipeline)


def refuse_while_importing() -> None:
    """Raise `ConfigError` if a module that is imported for its pipeline runs one itself."""
    if module := _importing.get():
        guard = 'if __name__ == "__main__":'
        raise ConfigError(f"module {module!r} runs a pipeline while it is imported: put the call under {guard}")


def importable(pipeline: Pipeline) -> Loaded:
    """Import the pipeline by a name for other processes, and check that its graph is the same."""
    files = (module for module in [*sys.modules.values()] if _is_file(module))
    scopes = (pipeline.scope, caller().f_globals, *map(vars, files))
    bound = [(scope, name) for scope in scopes for name, value in scope.items() if value is pipeline]
    if not bound:
        raise ConfigError(
            f"worker processes import pipeline {pipeline.name!r}, but no global variable of a module holds it: assign "
            f"it to one, or use `exactlyonce run module:function`; {_INLINE}"
        )
    scope, attribute = bound[0]
    reference = reference_of(scope, attribute)
    imported = load_reference(reference)
    if imported.build().fingerprint() != pipeline.build().fingerprint():
        name = f"{reference['module']}:{attribute}"
        raise ConfigError(f"importing {name} gives another graph: does it depend on how it is run?")
    return Loaded(imported, reference)


def reference_of(scope: Mapping[str, Any], attribute: str) -> Reference:
    """The reference of a global variable of the module with the globals *scope*."""
    module, path = _module_name(scope)
    return {"module": module, "attribute": attribute, "params": {}, "path": str(path)}


def _is_file(module: object) -> bool:
    return isinstance(module, ModuleType) and getattr(module, "__file__", None) is not None


def _module_name(scope: Mapping[str, Any]) -> tuple[str, Path]:
    """The import name and folder of the module with these globals."""
    spec, file = scope.get("__spec__"), scope.get("__file__")
    if file is None:
        raise ConfigError(
            f"worker processes cannot import a pipeline of a notebook or a prompt: save it as a module, or begin its "
            f"cell with %%pipeline NAME, after %load_ext exactlyonce; {_INLINE}"
        )
    folder = Path(file).resolve().parent
    if spec is None:
        name = Path(file).stem
        if not name.isidentifier():
            raise ConfigError(f"worker processes cannot import a file named {Path(file).name}: rename it; {_INLINE}")
        return name, folder
    depth = spec.name.count(".") + (spec.submodule_search_locations is not None)
    return spec.name, folder.parents[depth - 1] if depth else folder


def import_module(name: str, path: str) -> ModuleType:
    """The module *name*, which is looked for in the folder *path* first; `ConfigError` if it cannot be imported."""
    if name == "__main__":
        raise ConfigError(f"worker processes cannot import __main__: name the module; {_INLINE}")
    if path not in sys.path:
        sys.path.insert(0, path)
    if name not in sys.modules:  # the file may be newer than the process
        importlib.invalidate_caches()
    try:
        with _users_code(f"importing {name}"):
            token = _importing.set(name)
            try:
                return importlib.import_module(name)
            finally:
                _importing.reset(token)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{name}.".startswith(f"{missing}."):
            raise ConfigError(f"there is no module {name!r} in {path}") from None
        raise ConfigError(f"module {name!r} imports {missing!r}, which is not installed") from None


@contextmanager
def _users_code(doing: str) -> Iterator[None]:
    """Turn an exception of the user's code into an error that names its line."""
    try:
        yield
    except shape.UnsupportedType as error:
        raise GraphError(f"{raised_at(error)}: {error}") from None
    except (UserError, ModuleNotFoundError):
        raise
    except users_errors() as error:
        where = raised_at(error)
        at = f"{where}: " if where else ""
        raise ConfigError(f"{at}{doing} failed: {type(error).__name__}: {error}") from error


def _made(target: str, found: Any, params: Mapping[str, str]) -> Pipeline:
    if isinstance(found, Pipeline):
        if params:
            raise ConfigError(f"{target} is a pipeline and takes no parameters; a function that returns one does")
        return found
    if not callable(found):
        raise ConfigError(f"{target} is neither a pipeline nor a function that returns one, but {found!r}")
    arguments = _arguments(target, found, params)
    with _users_code(f"{target}()"):
        pipeline = found(**arguments)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"{target}() must return a Pipeline, and returned {pipeline!r}")
    return pipeline


def _arguments(target: str, function: Callable[..., Any], params: Mapping[str, str]) -> dict[str, Any]:
    """The parameters, each converted to its annotated type."""
    wanted = inspect.signature(function).parameters
    required = {name for name, parameter in wanted.items() if parameter.default is parameter.empty}
    for problem, names in (("has no parameter", params.keys() - wanted), ("needs parameter", required - params.keys())):
        if names:
            known = ", ".join(map(str, wanted.values())) or "nothing"
            raise ConfigError(f"{target} {problem} {', '.join(sorted(names))}; it takes: {known}")
    types = hints.declared(function, {})
    return {name: _converted(target, name, text, types.get(name, str)) for name, text in params.items()}


def _converted(target: str, name: str, text: str, type_: Any) -> Any:
    try:
        return msgspec.convert(text, type_, strict=False)
    except (msgspec.ValidationError, TypeError):  # their text may repeat the value, which may be a secret
        raise ConfigError(f"{target}: the value of parameter {name} is not {shape.type_name(type_)}") from None


def _pipelines(names: Mapping[str, Any]) -> list[str]:
    """The names of pipelines, and of functions that are annotated to return one."""

    def is_one(value: Any) -> bool:
        makes_one = inspect.isfunction(value) and hints.declared(value, {}).get("return") is Pipeline
        return makes_one or isinstance(value, Pipeline)

    return [name for name, value in names.items() if is_one(value)]


def _likely_functions(scope: Mapping[str, Any], asked: str) -> list[str]:
    """The functions of the module with the globals *scope* that do not say what they return, and whose code names
    `Pipeline`, or whose name is like *asked*."""
    unannotated = {
        name: value.__code__.co_names
        for name, value in scope.items()
        if inspect.isfunction(value)
        and value.__module__ == scope.get("__name__")
        and "return" not in hints.declared(value, {})
    }
    near = nearest(asked, unannotated)
    return [name for name, used in unannotated.items() if name == near or Pipeline.__name__ in used]


_PREFIX = "exactlyonce-notebook-"
_REMEDIES: dict[type[BaseException], str] = {
    NameError: "A cell of %%pipeline is a module of its own: it imports and defines all that it uses.",
    SyntaxError: "A cell of %%pipeline is plain Python: lines with % or ! go into another cell.",
}


def load_magic(shell: Any) -> None:
    """Make ``%%pipeline`` known to *shell*, an `InteractiveShell` of IPython."""
    shell.register_magic_function(partial(_pipeline, shell), "cell", "pipeline")


def _pipeline(shell: Any, line: str, cell: str) -> None:
    """Write the cell to a module, import it, and put its public names into the notebook."""
    name = line.strip()
    if not name.isidentifier():
        raise ConfigError(f"%%pipeline {name}".rstrip() + ": name the cell by an identifier, as %%pipeline orders.")
    module = f"{name}_{hashlib.sha256(cell.encode()).hexdigest()[:8]}"
    file = Path(_folder().name, f"{module}.py")
    file.write_text(cell)
    try:
        names = vars(import_module(module, str(file.parent)))
    except ConfigError as error:
        for kind, remedy in _REMEDIES.items():
            if isinstance(error.__cause__, kind):
                raise ConfigError(f"{error}. {remedy}") from error
        raise
    shell.push({key: value for key, value in names.items() if not key.startswith("_")})


def cell_file(reference: Reference) -> Path | None:
    """The file of a pipeline's module that ``%%pipeline`` has written here; None for any other module."""
    folder = Path(str(reference["path"]))
    return folder / f"{reference['module']}.py" if folder.name.startswith(_PREFIX) else None


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The folder of this process's modules; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix=_PREFIX)

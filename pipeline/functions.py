"""The functions that a user passes, read without calling them: signature, types, and mistakes; and what they are given.

Four things are accepted: a function, a callable object, a class (or `functools.partial` of one, or a function without
parameters) that makes a callable on the worker, and a class whose constructor is the function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import TypeForm
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TypeGuard, get_args, get_origin

from exactlyonce.pipeline import hints
from exactlyonce.pipeline.hints import UNKNOWN

T = TypeVar("T")
U = TypeVar("U")
U_contra = TypeVar("U_contra", contravariant=True)


@dataclass(frozen=True, init=False)
class Output(Generic[T]):
    """A side output: declared by ``outputs=[late]`` of an operator, fed by ``emit(value, late)``.

    ``stream.side(late)`` is its stream. `split`, `stateful_map` and `stateful_flat_map` have side outputs.
    """

    name: str
    type: Any

    def __init__(self, name: str, type: TypeForm[T]) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "type", type)


class Emit(Protocol[U_contra]):
    """The `emit` of a `split` function: emits a value to the main output or to a side output."""

    @overload
    def __call__(self, value: U_contra) -> None: ...
    @overload
    def __call__(self, value: T, output: Output[T]) -> None: ...
    def __call__(self, value: Any, output: Output[Any] | None = None) -> None: ...


class SideEmit(Protocol):
    """The `emit` of a function with state: emits a value to a side output. The function returns its main output."""

    def __call__(self, value: T, output: Output[T]) -> None: ...


@dataclass(frozen=True)
class Context:
    """The place of an operator: subtask 0 to parallelism - 1 of the operator with this id."""

    operator: str
    subtask: int
    parallelism: int


class Operator:
    """A base for operators with a resource: made on the worker, opened before the first record, closed after the last.

    Pass the class, or ``functools.partial(Class, argument)``, in place of a function:

        class Enrich(Operator):
            def open(self, context: Context) -> None:
                self.names = sqlite3.connect("names.db")

            def __call__(self, order: Order) -> Enriched: ...

    The base class is optional: any class with `__call__` will do, and `open` and `close` are called if it has them.
    `close` is not called when a worker is killed.
    """

    def open(self, context: Context) -> None:
        """Make the resource."""

    def close(self) -> None:
        """Release the resource."""


@dataclass(frozen=True)
class Function:
    """A user's function. *factory*: call it on the worker to get the function."""

    call: Any
    name: str
    factory: bool = False
    generator: bool = False
    parameters: tuple[Any, ...] = ()
    returns: Any = UNKNOWN
    problems: tuple[str, ...] = ()

    @property
    def item(self) -> Any:
        return hints.element(self.returns)

    @property
    def emitted(self) -> Any:
        """U if the second parameter is `Emit[U]`."""
        return emitted(self.parameters[1:2])


def emitted(parameter: tuple[Any, ...]) -> Any:
    """U if *parameter*, of a function, is `Emit[U]`."""
    return hints.known(get_args(parameter[0])[0]) if parameter and get_origin(parameter[0]) is Emit else UNKNOWN


def read(fn: Any, takes: tuple[str, ...], names: Mapping[str, Any], *, awaited: bool = False) -> Function:
    """Read an argument that should be a function of *takes*; *names* are the locals at the call. *awaited*: it is to be
    async."""
    if not callable(fn):
        return Function(fn, repr(fn), problems=(f"expected a function of ({', '.join(takes)}), got {fn!r}",))
    made = fn.func if isinstance(fn, functools.partial) else fn
    if isinstance(made, type):
        return _read_class(fn, made, takes, names, awaited=awaited)
    if not inspect.isroutine(made) and callable(getattr(made, "open", None)):
        name = type(made).__name__
        fix = f"pass the class, {name}, or functools.partial({name}, ...): it is made on the worker"
        return Function(fn, name, problems=(f"{name} has open(), so an instance cannot be passed: {fix}",))
    if _takes_nothing(fn):
        returned = hints.declared(made, names).get("return", UNKNOWN)
        if _defines_call(returned):
            return _read_class(fn, returned, takes, names, awaited=awaited)
        problems = () if returned is UNKNOWN else misfit(fn, takes)
        return Function(fn, _name(made), factory=True, problems=problems)
    target = made if inspect.isroutine(made) else type(made).__call__
    return _shaped(fn, target, inspect.signature, takes, names, name=_name(made), awaited=awaited)


def _read_class(fn: Any, cls: type, takes: tuple[str, ...], names: Mapping[str, Any], *, awaited: bool) -> Function:
    if _defines_call(cls):
        return read_method(fn, cls, "__call__", takes, names, awaited=awaited)
    if hasattr(cls, "open"):
        problem = f"class {cls.__name__} has open() but no __call__({', '.join(('self', *takes))})"
        return Function(fn, cls.__name__, factory=True, problems=(problem,))
    problems = misfit(fn, takes)
    return Function(fn, cls.__name__, returns=cls, problems=problems)


def read_method(
    fn: Any, cls: type, name: str, takes: tuple[str, ...], names: Mapping[str, Any], *, awaited: bool = False
) -> Function:
    """Read method *name* of *cls*, whose instances *fn* makes on the worker."""
    method = getattr(cls, name)

    def signature(_: Any) -> inspect.Signature:
        whole = inspect.signature(method)
        return whole.replace(parameters=list(whole.parameters.values())[1:])

    shown = cls.__name__ if name == "__call__" else f"{cls.__name__}.{name}"
    return _shaped(fn, method, signature, takes, names, name=shown, factory=True, awaited=awaited)


def _shaped(
    fn: Any,
    target: Callable[..., Any],
    signature: Callable[[Any], inspect.Signature],
    takes: tuple[str, ...],
    names: Mapping[str, Any],
    name: str,
    factory: bool = False,
    awaited: bool = False,
) -> Function:
    types = hints.declared(target, names)
    problems = misfit(fn, takes, signature, name)
    is_async = inspect.iscoroutinefunction(target)
    if inspect.isasyncgenfunction(target) or (is_async and not awaited):
        problems += (f"{name} is async, and this operator does not await: write it as a plain function",)
    if awaited and not is_async:
        problems += (f"{name} is not async: write it as async def {name}({', '.join(takes)})",)
    return Function(
        call=fn,
        name=name,
        factory=factory,
        generator=inspect.isgeneratorfunction(target),
        parameters=tuple(types.get(parameter, UNKNOWN) for parameter in _positional(fn, signature)),
        returns=types.get("return", UNKNOWN),
        problems=problems,
    )


def misfit(
    fn: Any, takes: tuple[str, ...], signature: Callable[[Any], inspect.Signature] = inspect.signature, name: str = ""
) -> tuple[str, ...]:
    """The mistake of a function that cannot be called with *takes*, if it is one; *name* is it for people."""
    try:
        shape = signature(fn)
    except ValueError:  # some builtins have no signature
        return ()
    try:
        shape.bind(*takes)
    except TypeError:
        return (f"{name or _name(fn)}{shape} must take ({', '.join(takes)})",)
    return ()


def _positional(fn: Any, signature: Callable[[Any], inspect.Signature]) -> list[str]:
    try:
        parameters = signature(fn).parameters.values()
    except ValueError:
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _takes_nothing(fn: Any) -> bool:
    try:
        return not inspect.signature(fn).parameters
    except ValueError:
        return False


def _defines_call(cls: Any) -> TypeGuard[type[Callable[..., Any]]]:
    """Whether instances can be called; `callable(cls)` only says that the class can."""
    return isinstance(cls, type) and any("__call__" in base.__dict__ for base in cls.__mro__)


def _name(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        fn = fn.func
    name: str = getattr(fn, "__name__", type(fn).__name__)
    return "the lambda" if name == "<lambda>" else name

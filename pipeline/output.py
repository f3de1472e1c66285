"""Named outputs beside the main one: late data, dead letters, branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import TypeForm

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

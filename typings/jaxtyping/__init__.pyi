"""`jaxtyping`, whose `PyTree` and `jaxtyped(typechecker=...)` are unknown upstream.

A shape is a run-time matter: statically `Float[Array, "..."]` is `Array`, and `PyTree`
and `PyTree[...]` are `Any`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import (
    Annotated as BFloat16,
    Annotated as Bool,
    Annotated as Complex,
    Annotated as Complex64,
    Annotated as Complex128,
    Annotated as Float,
    Annotated as Float16,
    Annotated as Float32,
    Annotated as Float64,
    Annotated as Inexact,
    Annotated as Int,
    Annotated as Int8,
    Annotated as Int16,
    Annotated as Int32,
    Annotated as Int64,
    Annotated as Integer,
    Annotated as Key,
    Annotated as Num,
    Annotated as Real,
    Annotated as Shaped,
    Annotated as UInt,
    Annotated as UInt8,
    Annotated as UInt16,
    Annotated as UInt32,
    Annotated as UInt64,
    Any,
    Literal,
    overload,
)

from jax import Array as Array, Array as PRNGKeyArray, Array as Scalar
from jax.tree_util import PyTreeDef as PyTreeDef
from jax.typing import (
    ArrayLike as ArrayLike,
    ArrayLike as ScalarLike,
    DTypeLike as DTypeLike,
)
from typing_extensions import ParamSpec, TypeAliasType, TypeVar

__all__ = [
    "Array",
    "ArrayLike",
    "BFloat16",
    "Bool",
    "Complex",
    "Complex64",
    "Complex128",
    "DTypeLike",
    "Float",
    "Float16",
    "Float32",
    "Float64",
    "Inexact",
    "Int",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "Integer",
    "Key",
    "Num",
    "PRNGKeyArray",
    "PyTree",
    "PyTreeDef",
    "Real",
    "Scalar",
    "ScalarLike",
    "Shaped",
    "TypeCheckError",
    "UInt",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
    "config",
    "install_import_hook",
    "jaxtyped",
]

_Leaf = TypeVar("_Leaf", default=Any)
_Structure = TypeVar("_Structure", default=Any)
PyTree = TypeAliasType("PyTree", Any, type_params=(_Leaf, _Structure))

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., object])
_Typechecker = Callable[..., Any] | None

@overload
def jaxtyped(*, typechecker: _Typechecker) -> Callable[[_F], _F]: ...
@overload
def jaxtyped(
    fn: Callable[_P, _T], *, typechecker: _Typechecker
) -> Callable[_P, _T]: ...
@overload
def jaxtyped(fn: Literal["context"]) -> AbstractContextManager[None]: ...
def install_import_hook(
    modules: str | Sequence[str], typechecker: str | None
) -> AbstractContextManager[None]: ...

class _Config:
    jaxtyping_disable: bool
    jaxtyping_remove_typechecker_stack: bool
    def update(self, item: str, value: bool | str) -> None: ...

config: _Config

class TypeCheckError(TypeError): ...

"""The public names of `equinox` that this project, lineax and optimistix use.

A stub replaces the module it is found for, so what is well typed upstream is
re-exported, and absolutely: a relative import would look among the stubs. What is
untyped there, or forgets the type of what it is given, is declared below.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    TypeVarTuple,
    overload,
)

import equinox.debug as debug
import equinox.internal as internal
import equinox.nn as nn
from equinox._ad import filter_checkpoint as filter_checkpoint
from equinox._enum import Enumeration as Enumeration
from equinox._filters import (
    combine as combine,
    is_array_like as is_array_like,
    is_inexact_array_like as is_inexact_array_like,
)
from equinox._jit import (
    EquinoxRuntimeError as EquinoxRuntimeError,
    filter_jit as filter_jit,
)
from equinox._make_jaxpr import filter_make_jaxpr as filter_make_jaxpr
from equinox._module import (
    AbstractClassVar as AbstractClassVar,
    AbstractVar as AbstractVar,
    Module as Module,
    Partial as Partial,
    field as field,
)
from equinox._pretty_print import (
    tree_pformat as tree_pformat,
    tree_pprint as tree_pprint,
)
from equinox._tree import (
    tree_check as tree_check,
    tree_equal as tree_equal,
)
from equinox._vmap_pmap import if_array as if_array
from jaxtyping import Array, ArrayLike
from typing_extensions import TypeIs

# `import x.y as y` re-exports only what `__all__` names.
__all__ = ["debug", "internal", "nn"]

_X = TypeVar("_X")
_R = TypeVar("_R")
_S = TypeVar("_S")
_Aux = TypeVar("_Aux")
_P = ParamSpec("_P")
_Primals = TypeVarTuple("_Primals")

def is_array(element: Any) -> TypeIs[Array]: ...
def is_inexact_array(element: Any) -> bool: ...
def filter(
    pytree: _X,
    filter_spec: Any,
    inverse: bool = False,
    replace: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> _X: ...
def partition(
    pytree: _X,
    filter_spec: Any,
    replace: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[_X, _X]: ...

class filter_custom_vjp(Generic[_X, _P, _R]):
    def __init__(self, fn: Callable[Concatenate[_X, _P], _R]) -> None: ...
    # fn_fwd(perturbed, vjp_arg, *args, **kwargs) -> (out, residuals)
    def def_fwd(
        self, fn_fwd: Callable[Concatenate[Any, _X, _P], tuple[_R, Any]]
    ) -> None: ...
    # fn_bwd(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs) -> grad_vjp_arg
    def def_bwd(
        self, fn_bwd: Callable[Concatenate[Any, Any, Any, _X, _P], Any]
    ) -> None: ...
    def __call__(self, vjp_arg: _X, /, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...

class filter_custom_jvp(Generic[_P, _R]):
    def __init__(self, fn: Callable[_P, _R]) -> None: ...
    # fn_jvp(primals, tangents, **kwargs) -> (out, tangent_out)
    def def_jvp(self, fn_jvp: Callable[..., tuple[_R, Any]]) -> None: ...
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...

@overload
def filter_grad(
    fun: Callable[Concatenate[_X, _P], ArrayLike], *, has_aux: Literal[False] = False
) -> Callable[Concatenate[_X, _P], _X]: ...
@overload
def filter_grad(
    fun: Callable[Concatenate[_X, _P], tuple[ArrayLike, _Aux]],
    *,
    has_aux: Literal[True],
) -> Callable[Concatenate[_X, _P], tuple[_X, _Aux]]: ...
@overload
def filter_grad(
    *, has_aux: Literal[False] = False
) -> Callable[
    [Callable[Concatenate[_X, _P], ArrayLike]], Callable[Concatenate[_X, _P], _X]
]: ...
@overload
def filter_grad(
    *, has_aux: Literal[True]
) -> Callable[
    [Callable[Concatenate[_X, _P], tuple[ArrayLike, _Aux]]],
    Callable[Concatenate[_X, _P], tuple[_X, _Aux]],
]: ...
@overload
def filter_value_and_grad(
    fun: Callable[Concatenate[_X, _P], tuple[_R, _Aux]],
    *,
    has_aux: Literal[True],
) -> Callable[Concatenate[_X, _P], tuple[tuple[_R, _Aux], _X]]: ...
@overload
def filter_value_and_grad(
    fun: Callable[Concatenate[_X, _P], _R], *, has_aux: Literal[False] = False
) -> Callable[Concatenate[_X, _P], tuple[_R, _X]]: ...
@overload
def filter_value_and_grad(
    *, has_aux: bool = False
) -> Callable[
    [Callable[Concatenate[_X, _P], _R]], Callable[Concatenate[_X, _P], tuple[_R, _X]]
]: ...
@overload
def filter_vmap(
    fun: Callable[_P, _R],
    *,
    in_axes: Any = ...,
    out_axes: Any = ...,
    axis_name: Hashable = None,
    axis_size: int | None = None,
) -> Callable[_P, _R]: ...
@overload
def filter_vmap(
    *,
    in_axes: Any = ...,
    out_axes: Any = ...,
    axis_name: Hashable = None,
    axis_size: int | None = None,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def filter_jvp(
    fn: Callable[..., _R], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[_R, Any]: ...
@overload
def filter_vjp(
    fun: Callable[[*_Primals], _R], *primals: *_Primals, has_aux: Literal[False] = False
) -> tuple[_R, Callable[[Any], tuple[*_Primals]]]: ...
@overload
def filter_vjp(
    fun: Callable[[*_Primals], tuple[_R, _S]],
    *primals: *_Primals,
    has_aux: Literal[True],
) -> tuple[_R, Callable[[Any], tuple[*_Primals]], _S]: ...
def filter_jacfwd(
    fun: Callable[Concatenate[_X, _P], Any],
) -> Callable[Concatenate[_X, _P], Any]: ...
def filter_jacrev(
    fun: Callable[Concatenate[_X, _P], Any],
) -> Callable[Concatenate[_X, _P], Any]: ...
def filter_hessian(
    fun: Callable[Concatenate[_X, _P], Any],
) -> Callable[Concatenate[_X, _P], Any]: ...
def filter_closure_convert(
    fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> Callable[_P, _R]: ...
def filter_eval_shape(
    fun: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> _R: ...
def tree_at(
    where: Callable[[_X], Any],
    pytree: _X,
    replace: Any = ...,
    replace_fn: Callable[[Any], Any] = ...,
    is_leaf: Callable[[Any], bool] | None = None,
) -> _X: ...
def apply_updates(model: _X, updates: Any) -> _X: ...
def error_if(
    x: _X,
    pred: ArrayLike,
    msg: str,
    *,
    on_error: Literal["default", "raise", "breakpoint", "nan", "off"] = "default",
) -> _X: ...
def clear_caches() -> None: ...

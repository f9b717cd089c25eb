"""Root finding by optimistix, given types."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
import lineax as lx  # pyright: ignore[reportMissingTypeStubs]  # has none
import optimistix as optx
from jaxtyping import Array, Float

_Args = TypeVar("_Args")

_MAX_STEPS = 64


def tolerance(x: Float[Array, "..."]) -> float:
    """Eight times the rounding error of a one in the dtype of `x`."""
    return 1e-6 if x.dtype == jnp.float32 else 2e-15


def find_roots(
    function: Callable[[Float[Array, "..."], _Args], Float[Array, "..."]],
    start: Float[Array, "..."],
    args: _Args,
    *,
    tolerance: float,
) -> Float[Array, "..."]:
    """Where `function(x, args)` is 0: each of its results of its own entry of x alone.

    By Newton steps from `start`, all at a time, until the last one is below
    `tolerance`. Derivatives are those of the implicit function, of any order.
    """
    linear = lx.Diagonal()
    return optx.root_find(  # pyright: ignore[reportUnknownMemberType]  # has no types
        function,
        optx.Newton(rtol=tolerance, atol=tolerance, linear_solver=linear),
        start,
        args,
        tags=frozenset({lx.diagonal_tag}),
        adjoint=optx.ImplicitAdjoint(linear),
        max_steps=_MAX_STEPS,
        throw=False,
    ).value

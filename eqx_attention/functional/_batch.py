"""One batch element at a time."""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
from jax import lax
from jaxtyping import Array, PyTree

from .._jax import tree_map

_Carry = TypeVar("_Carry")
_Out = TypeVar("_Out")


def fold_batch(
    function: Callable[..., tuple[_Carry, _Out]],
    carry: _Carry,
    *trees: PyTree,
    batch: int,
) -> tuple[_Carry, _Out]:
    """`function(carry, *elements)` of one batch element after the other.

    It returns the next carry and a result; the results are stacked again. Arrays keep
    their batch axis, of size 1, on the way in and out. Those that have it as 1 already
    are the same for all elements.
    """

    def has_own(x: Array) -> bool:
        return x.shape[0] == batch

    own, shared = eqx.partition(trees, has_own)

    def step(carry: _Carry, own: PyTree) -> tuple[_Carry, _Out]:
        own = tree_map(lambda x: x[None], own)
        carry, out = function(carry, *eqx.combine(own, shared))
        return carry, tree_map(lambda x: x[0], out)

    return lax.scan(step, carry, own)


def map_batch(function: Callable[..., _Out], *trees: PyTree, batch: int) -> _Out:
    """`function` of each batch element, as in `fold_batch`, with nothing carried."""

    def step(carry: None, *elements: PyTree) -> tuple[None, _Out]:
        return carry, function(*elements)

    return fold_batch(step, None, *trees, batch=batch)[1]

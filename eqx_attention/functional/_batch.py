"""One batch element at a time."""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
from jaxtyping import Array, PyTree

from .._jax import map_, tree_map

_Out = TypeVar("_Out")


def map_batch(function: Callable[..., _Out], *trees: PyTree, batch: int) -> _Out:
    """`function` of each batch element, one after the other; results stacked again.

    Arrays keep their batch axis, of size 1, on the way in and out. Those that have it
    as 1 already are the same for all elements.
    """

    def has_own(x: Array) -> bool:
        return x.shape[0] == batch

    own, shared = eqx.partition(trees, has_own)

    def one(own: PyTree) -> _Out:
        own = tree_map(lambda x: x[None], own)
        return tree_map(lambda x: x[0], function(*eqx.combine(own, shared)))

    return map_(one, own)

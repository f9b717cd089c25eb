"""Primitives of JAX whose arguments are trees of arrays and of anything else.

Those of `equinox.internal`, given types.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax.interpreters.ad import UndefinedPrimal
from jax.sharding import PartitionSpec
from jaxtyping import Array, DTypeLike, PyTree

_X = TypeVar("_X")

Primitive: TypeAlias = Any
"""JAX says no type of its own for it."""


def create_primitive(
    name: str,
    implement: Callable[..., PyTree],
    abstract: Callable[..., PyTree],
    jvp: Callable[[Any, Any], tuple[PyTree, PyTree]],
    transpose: Callable[[Any, Any], tuple[PyTree, ...]],
) -> Primitive:
    """A primitive with rules for all transformations; that for `vmap` maps the others.

    **Arguments:**

    - `implement`: from arguments to results.
    - `abstract`: the same for types, as `array_type` makes them.
    - `jvp`: from arguments and their tangents to results and theirs; None is zero.
    - `transpose`: from arguments, unknown those in which the primitive is linear, and
        cotangents of results to those of the unknown arguments; None is zero.
    """
    return eqxi.create_vprim(  # pyright: ignore[reportUnknownMemberType]  # has no types
        name,
        eqxi.filter_primitive_def(implement),  # pyright: ignore[reportUnknownMemberType]  # as above
        eqxi.filter_primitive_def(abstract),  # pyright: ignore[reportUnknownMemberType]  # as above
        eqxi.filter_primitive_jvp(jvp),  # pyright: ignore[reportUnknownMemberType]  # as above
        eqxi.filter_primitive_transpose(transpose),
    )


def bind(primitive: Primitive, *args: PyTree) -> Any:
    """Applies a primitive."""
    return eqxi.filter_primitive_bind(primitive, *args)  # pyright: ignore[reportUnknownMemberType]  # has no types


def no_transpose(inputs: Any, cotangents: Any) -> tuple[PyTree, ...]:
    """The rule of a primitive that is not linear in any of its arguments."""
    del inputs, cotangents
    raise NotImplementedError("only what is linear has a transpose")


def is_unknown(x: object) -> bool:
    """Whether this argument of a transpose is one that the primitive is linear in."""
    return isinstance(x, UndefinedPrimal)


def array_type(like: Any, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """The type of an array that varies over the mesh axes that another varies over."""
    sharding = like.sharding.update(spec=PartitionSpec(*(None for _ in shape)))
    return like.update(shape=shape, dtype=jnp.dtype(dtype), sharding=sharding)


def batch_together(tree: _X, *others: Array) -> _X:
    """`tree`, with each array batched under any `vmap` that batches one, or `others`.

    It is linear in the tree. Equinox's rule for `vmap` gives an argument that is not
    batched a cotangent that is not, though the results are batched by other arguments:
    what is to be transposed must have the batch axis everywhere.
    """
    leaves = [*jax.tree.leaves(tree), *others]
    none = jnp.asarray(False)

    def first(x: Array) -> Array:
        """0, but JAX does not know."""
        first = jnp.ravel(x)[0]
        return jnp.where(none, first, jnp.zeros_like(first))

    def together(x: Array) -> Array:
        for other in leaves:
            x = x + first(other).astype(x.dtype)
        return x

    return jax.tree.map(together, tree)

"""Functions of a user's own in masks and scores: what they may be, how they run."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree
from typing_extensions import override

from .._jax import is_traced, tree_map


class Plain(eqx.Module):
    """A function without fields, as a module without arrays."""

    function: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, *args: Array) -> Any:
        """Calls it."""
        return self.function(*args)

    @override
    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


class Bound(eqx.Module):
    """A function whose arrays have a batch axis of 1 in front, as all others have."""

    arrays: PyTree
    rest: PyTree = eqx.field(static=True)

    @staticmethod
    def of(function: Callable[..., Any]) -> "Bound":
        """`function` may be a module, whose arrays are taken out of it."""
        function = jax.tree.map(_as_array, function)
        arrays, rest = eqx.partition(function, eqx.is_array)
        return Bound(tree_map(lambda x: x[None], arrays), rest)

    def __call__(self, *args: Array) -> Any:
        """Calls it with its own arrays."""
        arrays = tree_map(lambda x: x[0], self.arrays)
        return eqx.combine(arrays, self.rest)(*args)


def own_function(name: str, function: object) -> Callable[..., Any]:
    """`function` as a module; one that closes over traced values is refused."""
    if not callable(function):
        raise TypeError(f"{name} is {function!r}, but must be callable")
    if _is_tree(function):
        return function
    for variable, value in _enclosed(function):
        leaves = jax.tree.leaves(value)
        if any(isinstance(x, jax.Array) and is_traced(x) for x in leaves):
            raise ValueError(
                f"{name} closes over {variable!r}, which is traced: make it a field of "
                "an eqx.Module with a __call__, and give that"
            )
    return Plain(function)


def probe(
    name: str, function: Bound, *args: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct:
    """What comes out of `function`, without running it."""
    out: object = eqx.filter_eval_shape(function, *args)  # pyright: ignore[reportArgumentType]  # shapes stand for arrays
    if not isinstance(out, jax.ShapeDtypeStruct):
        raise TypeError(f"{name} returned {out!r}, but must return an array")
    return out


def _is_tree(function: object) -> bool:
    return isinstance(function, eqx.Module | jax.tree_util.Partial)


def _as_array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _enclosed(function: Any) -> Iterator[tuple[str, object]]:
    """What a function has beside its arguments, by name."""
    if isinstance(function, functools.partial):
        yield from ((f"args[{i}]", x) for i, x in enumerate(function.args))
        yield from function.keywords.items()
        yield from _enclosed(function.func)
        return
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(
        names, getattr(function, "__closure__", None) or (), strict=True
    ):
        try:
            value = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
        yield name, value
        if callable(value) and not _is_tree(value):
            yield from _enclosed(value)
    for i, value in enumerate(getattr(function, "__defaults__", None) or ()):
        yield f"default {i}", value

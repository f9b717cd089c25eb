"""Functions of JAX whose types a static checker can't see, given types.

They are called through this file, so that each ignored rule stands in one place.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray, Shaped, UInt32

_Carry = TypeVar("_Carry")
_Out = TypeVar("_Out")
_X = TypeVar("_X")
_Args = TypeVarTuple("_Args")

_Index: TypeAlias = int | Int[Array, ""]


def accumulation_dtype(*arrays: Float[Array, "..."]) -> DTypeLike:
    """The dtype to sum products of `arrays` in: float32, or float64 if one is."""
    wide = any(x.dtype == jnp.float64 for x in arrays)
    return jnp.float64 if wide else jnp.float32


def on_cpu() -> bool:
    """Whether arrays go to a CPU unless they are put elsewhere."""
    return jax.default_backend() == "cpu"


def x64_is_on() -> bool:
    """Whether arrays may have 64 bits."""
    return jnp.result_type(float) == jnp.float64


def promotion_is_strict() -> bool:
    """Whether arrays of different dtypes may not meet."""
    return jax.config.jax_numpy_dtype_promotion == "strict"  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportAttributeAccessIssue]  # is set by name


def is_traced(x: Array) -> bool:
    """Whether the values of `x` are not known yet, as under `jit`."""
    return isinstance(x, Tracer)


def positive_range(dtype: DTypeLike) -> tuple[float, float]:
    """The least positive number of a floating dtype at full precision; the greatest."""
    limits = jnp.finfo(dtype)  # pyright: ignore[reportUnknownVariableType]  # of any dtype
    return float(limits.tiny), float(limits.max)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # as above


def threefry_key(words: UInt32[Array, "2"]) -> PRNGKeyArray:
    """`jax.random.wrap_key_data`: a key of JAX's default kind, of 64 bits."""
    return jax.random.wrap_key_data(words, impl="threefry2x32")  # pyright: ignore[reportUnknownVariableType]  # has no types


def einsum(
    spec: str,
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of two arrays; by default it sums in float32 or wider."""
    if preferred_element_type is None:
        preferred_element_type = accumulation_dtype(a, b)
    return jnp.einsum(  # pyright: ignore[reportUnknownMemberType]  # third overload
        spec, a, b, precision=precision, preferred_element_type=preferred_element_type
    )


def pad(
    x: Shaped[Array, "..."],
    widths: Sequence[tuple[int, int]],
    *,
    fill: bool | int | float = 0,
) -> Shaped[Array, "..."]:
    """`x` with `widths[axis] = (before, after)` entries of `fill` put around it."""
    return jnp.pad(x, widths, constant_values=fill)  # pyright: ignore[reportUnknownMemberType]  # its **kwargs


def read_bits(
    read: Callable[[Shaped[Array, "..."], _X], Shaped[Array, "..."]],
    x: Shaped[Array, "..."],
    index: _X,
) -> Shaped[Array, "..."]:
    """`read(x, index)`, some entries of `x`: in a loop, without a copy of all of it.

    A CPU reads bfloat16 as float32, and XLA converts the whole array ahead of the loop.
    Integers need not be converted; and what the barrier lets through seems to change in
    each step, so nothing of it can be made ahead.
    """
    if x.dtype != jnp.bfloat16 or not on_cpu():
        return read(x, index)
    x, index = lax.optimization_barrier((x, index))  # pyright: ignore[reportUnknownMemberType]  # has no types
    bits = read(lax.bitcast_convert_type(x, jnp.uint16), index)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def platform_dependent(
    x: Float[Array, "..."],
    *,
    cpu: Callable[[Array], Array],
    default: Callable[[Array], Array],
) -> Float[Array, "..."]:
    """`lax.platform_dependent`: `cpu(x)` where that is lowered for a CPU."""
    return lax.platform_dependent(x, cpu=cpu, default=default)  # pyright: ignore[reportUnknownVariableType]  # has no types


def switch(
    index: Int[Array, ""], branches: Sequence[Callable[[], Shaped[Array, "..."]]]
) -> Shaped[Array, "..."]:
    """`lax.switch`: what the branch of that index returns."""
    return lax.switch(index, branches)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # has no types


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """`jnp.broadcast_shapes`, of sizes that are known."""
    return tuple(int(n) for n in jnp.broadcast_shapes(*shapes))  # pyright: ignore[reportUnknownMemberType]  # a size may be traced


def shape_of(fn: Callable[[], Shaped[Array, "..."]]) -> tuple[int, ...]:
    """The shape of what `fn` returns, without running it."""
    return jax.eval_shape(fn).shape  # pyright: ignore[reportUnknownMemberType]  # has no types


def fori_loop(
    lower: _Index,
    upper: _Index,
    body: Callable[[Int[Array, ""], _Carry], _Carry],
    init: _Carry,
) -> _Carry:
    """`lax.fori_loop`, whose index is int32, whether or not x64 is on."""

    # Without `jit` it is a plain int.
    def step(index: _Index, carry: _Carry) -> _Carry:
        return body(jnp.asarray(index, jnp.int32), carry)

    return lax.fori_loop(lower, upper, step, init)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # has no types


def cond(
    pred: Bool[Array, ""], true: Callable[[], _Out], false: Callable[[], _Out]
) -> _Out:
    """`lax.cond`: one of two functions of nothing, of which the other is not run."""
    return lax.cond(pred, true, false)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # has no types


def map_(fn: Callable[[_X], _Out], xs: _X) -> _Out:
    """`lax.map`: `fn` of each slice along the leading axis of `xs`, one by one."""
    return lax.map(fn, xs)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # has no types


def vjp(
    fn: Callable[[*_Args], _Out], *primals: *_Args
) -> tuple[_Out, Callable[[_Out], tuple[*_Args]]]:
    """`jax.vjp`: `fn(*primals)`, and what takes its cotangent to those of `primals`."""
    return jax.vjp(fn, *primals)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # has no types


def tree_map(fn: Callable[[Array], Array], tree: _X) -> _X:
    """`jax.tree.map` of a tree of arrays, which keeps the tree's type."""
    return jax.tree.map(fn, tree)


def block_until_ready(tree: _X) -> _X:
    """`jax.block_until_ready`: `tree`, when all of its arrays are computed."""
    return jax.block_until_ready(tree)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]  # has no types


def varying_axes(x: Array) -> frozenset[str]:
    """The mesh axes over which `x` varies: none outside `shard_map(check_vma=True)`."""
    return frozenset(jax.typeof(x).mat.varying)


def vary_like(tree: _X, axes: frozenset[str]) -> _X:
    """`tree`, with each of its arrays made to vary over the mesh axes `axes`.

    A scan refuses a carry that varies less at its start than after a step.
    """

    def vary(leaf: Any) -> Any:
        if not eqx.is_array(leaf):
            return leaf
        missing = tuple(sorted(axes - varying_axes(leaf)))
        if not missing:
            return leaf
        return lax.pcast(leaf, missing, to="varying")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # has no types

    return jax.tree.map(vary, tree)


def error_if(x: Array, wrong: Bool[Array, "..."], message: str) -> Array:
    """`equinox.error_if`, under `shard_map` too: one device's error is that of all."""
    wrong = jnp.any(wrong)
    axes = tuple(sorted(varying_axes(wrong)))
    if axes:
        count = lax.psum(wrong.astype(jnp.int32), axes)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # has no types
        wrong = jnp.asarray(count > 0)
    if not varying_axes(x):
        return eqx.error_if(x, wrong, message)
    # What it returns does not vary, so x itself can't go through it.
    raised = eqx.error_if(jnp.asarray(False), wrong, message)
    return jnp.where(raised, jnp.zeros_like(x), x)


def vary_together(tree: _X) -> _X:
    """`tree`, with each of its arrays made to vary over the axes that any varies over.

    Under `shard_map`, what varies along an axis of the mesh and what is the same along
    it may not meet in a loop. Where the latter are made to vary, their gradients are
    summed over the axis by JAX.
    """
    axes: set[str] = set()
    for leaf in jax.tree.leaves(tree):
        if eqx.is_array(leaf):
            axes |= varying_axes(leaf)
    return vary_like(tree, frozenset(axes))

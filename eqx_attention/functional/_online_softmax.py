r"""The softmax that is never whole: a running maximum, sum and numerator.

Everything that is known of a row after some of its keys were seen is the triple

$$m = \max_j x_j, \quad l = \sum_j e^{x_j - m}, \quad n = \sum_j e^{x_j - m} v_j$$

and triples over disjoint keys can be joined in any order (Milakov & Gimelshein 2018,
Rabe & Staats 2021, Dao et al. 2022). Every backend ends in this triple.

The maximum is a point of reference and no more: `n / l` and `m + log l` do not depend
on it. So no gradient flows through it, which is exact for all that is made of these.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float


class SoftmaxState(eqx.Module):
    """What is known of each row after some of its keys. No key yet: -inf, 0 and 0."""

    numerator: Float[Array, "*rows v_dim"]
    max_logits: Float[Array, "*rows"]
    denominator: Float[Array, "*rows"]


def no_keys(shape: tuple[int, ...], dtype: DTypeLike) -> SoftmaxState:
    """The state before any key, for a numerator of the given shape."""
    zeros = jnp.zeros(shape[:-1], dtype)
    return SoftmaxState(jnp.zeros(shape, dtype), jnp.full_like(zeros, -jnp.inf), zeros)


def absorb(
    state: SoftmaxState | None,
    logits: Float[Array, "*rows keys"],
    weighted_sum: Callable[[Float[Array, "..."]], Float[Array, "..."]],
    dtype: DTypeLike,
) -> SoftmaxState:
    """`state` after the keys of `logits` as well; None is the state before any key.

    `weighted_sum` takes the weights `*rows keys`, relative to the new maximum, to the
    sum of the values `*rows v_dim`: products, and dropout, are its own affair.
    """
    max_logits = lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))
    max_logits = max_logits.astype(dtype)
    if state is not None:
        max_logits = jnp.maximum(max_logits, state.max_logits)
    reference = finite(max_logits)
    # Where derivatives are JAX's own, `exp_below` would keep a matrix more for them.
    exp = exp_of_difference if state is None else exp_below
    weights = exp(logits, reference[..., None]).astype(dtype)
    numerator, denominator = weighted_sum(weights), jnp.sum(weights, axis=-1)
    if state is not None:
        decay = jnp.exp(state.max_logits - reference)
        numerator = state.numerator * decay[..., None] + numerator
        denominator = state.denominator * decay + denominator
    return SoftmaxState(numerator, max_logits, denominator)


def exp_of_difference(
    logits: Float[Array, "..."], reference: Float[Array, "..."]
) -> Float[Array, "..."]:
    """`exp(logits - reference)`, in the dtype of the logits."""
    return jnp.exp(logits - reference.astype(logits.dtype))


def exp_below(
    logits: Float[Array, "..."], reference: Float[Array, "..."]
) -> Float[Array, "..."]:
    """`exp(logits - reference)` where no logit is above the reference.

    A compiler may make the logits again here, and round them otherwise than those that
    the maximum was taken of: at 1e9 a difference may come out as 64. Small ones stay as
    they are, for the sake of their derivative.
    """
    difference = logits - reference.astype(logits.dtype)
    return jnp.exp(jnp.where(difference > 1, jnp.zeros_like(difference), difference))


def absorb_sinks(
    state: SoftmaxState, sinks: Float[Array, "*rows num_sinks"]
) -> SoftmaxState:
    """`state` after columns that have a logit and no value."""
    sinks = sinks.astype(state.denominator.dtype)
    highest = jnp.max(sinks, axis=-1, initial=-jnp.inf)
    max_logits = lax.stop_gradient(jnp.maximum(state.max_logits, highest))
    reference = finite(max_logits)
    decay = jnp.exp(state.max_logits - reference)
    mass = jnp.sum(jnp.exp(sinks - reference[..., None]), axis=-1)
    return SoftmaxState(
        state.numerator * decay[..., None], max_logits, state.denominator * decay + mass
    )


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """The state after the keys of both."""
    max_logits = lax.stop_gradient(jnp.maximum(a.max_logits, b.max_logits))
    reference = finite(max_logits)
    decay_a, decay_b = (jnp.exp(x.max_logits - reference) for x in (a, b))
    return SoftmaxState(
        a.numerator * decay_a[..., None] + b.numerator * decay_b[..., None],
        max_logits,
        a.denominator * decay_a + b.denominator * decay_b,
    )


def finish(
    state: SoftmaxState,
) -> tuple[Float[Array, "*rows v_dim"], Float[Array, "*rows"]]:
    """The output and the log of the sum of exponentials; 0 and -inf without a key."""
    empty = is_empty(state)
    denominator = jnp.where(empty, jnp.ones_like(state.denominator), state.denominator)
    numerator = jnp.where(
        empty[..., None], jnp.zeros_like(state.numerator), state.numerator
    )
    lse = finite(state.max_logits) + jnp.log(denominator)
    return (
        numerator / denominator[..., None],
        jnp.where(empty, jnp.full_like(lse, -jnp.inf), lse),
    )


def is_empty(state: SoftmaxState) -> Bool[Array, "*rows"]:
    """True for the rows that have met no key and no sink."""
    return state.denominator == 0


def finite(max_logits: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """The maximum with 0 in place of -inf, so that no difference of two is NaN."""
    return jnp.where(max_logits == -jnp.inf, jnp.zeros_like(max_logits), max_logits)

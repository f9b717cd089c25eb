r"""The softmax that is never whole: a running maximum, sum and numerator.

Everything that is known of a row after some of its keys were seen is the triple

$$m = \max_j x_j, \quad l = \sum_j e^{x_j - m}, \quad n = \sum_j e^{x_j - m} v_j$$

and triples over disjoint keys can be joined in any order (Milakov & Gimelshein 2018,
Rabe & Staats 2021, Dao et al. 2022). Every backend ends in this triple.

The maximum is a point of reference and no more: `n / l` and `m + log l` do not depend
on it. So no gradient flows through it, which is exact for all that is made of these.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float

from .._jax import platform_dependent


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
    # Where there is no state yet, derivatives are JAX's own.
    exp = exp_of_difference if state is None else fast_exp_below
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
    """`exp(logits - reference)` where no logit is above the reference."""
    return jnp.exp(_difference_below(logits, reference))


def fast_exp_below(
    logits: Float[Array, "..."], reference: Float[Array, "..."]
) -> Float[Array, "..."]:
    """`exp_below` for weights that are used once, and have no derivative.

    On a CPU it makes the forward pass 3 to 7 % faster. The backward pass uses weights
    twice, and XLA, which takes all but `jnp.exp` for cheap, would make them twice.
    """
    difference = _difference_below(logits, reference)
    if difference.dtype != jnp.float32:
        return jnp.exp(difference)
    return platform_dependent(difference, cpu=_exp_not_above_0, default=jnp.exp)


def _difference_below(
    logits: Float[Array, "..."], reference: Float[Array, "..."]
) -> Float[Array, "..."]:
    """`logits - reference`, at most 0.

    A compiler may make the logits again here, and round them otherwise than those that
    the maximum was taken of: at 1e9 a difference may come out as 64.
    """
    difference = logits - reference.astype(logits.dtype)
    return jnp.minimum(difference, jnp.zeros_like(difference))


def _exp_not_above_0(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The exponential of float32 numbers that are not above 0; 0 below -88.

    `2^n 2^f` with n an integer and f within -1/2 and 1/2, by its Taylor polynomial. The
    relative error is at most 1.2e-7 (2 + |x|), 1e-7 (2 + |x|) where multiplying and
    adding is one step; beside the weight of the maximum, which is 1, that is 2.4e-7.
    """
    x = jnp.maximum(x * np.float32(1 / np.log(2)), np.float32(-127))
    n = jnp.round(x)
    f = x - n
    power = jnp.full_like(f, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        power = power * f + coefficient
    bits = lax.bitcast_convert_type(power, jnp.int32)
    # n goes into the exponent. At -127, where f is 0, what is left is 0.
    bits = bits + (n.astype(jnp.int32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


_TAYLOR = [np.float32(math.log(2) ** k / math.factorial(k)) for k in range(6, -1, -1)]


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


def merge_all(states: SoftmaxState) -> SoftmaxState:
    """The state after the keys of all states, which are stacked in front."""
    max_logits = lax.stop_gradient(jnp.max(states.max_logits, axis=0))
    decay = jnp.exp(states.max_logits - finite(max_logits)[None])
    return SoftmaxState(
        jnp.sum(states.numerator * decay[..., None], axis=0),
        max_logits,
        jnp.sum(states.denominator * decay, axis=0),
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

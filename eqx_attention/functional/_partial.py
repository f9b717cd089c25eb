"""Attention over some of the keys, and how the parts become a whole."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._config import check_is_a
from .._jax import accumulation_dtype
from .._typing import Lse, Out, checked
from ._layout import queries_by_position, rows_by_head
from ._online_softmax import SoftmaxState, finish, finite, merge


class PartialAttention(eqx.Module):
    """The pieces of an attention over some of the keys, not yet divided.

    **Fields:**

    - `numerator`: `*batch q_len q_heads v_dim`, float32 or wider: the sum of
        exp(x - max_logits) times values.
    - `max_logits`: `*batch q_heads q_len`: the greatest logit so far, -inf before any.
        It is a point of reference on which no result depends: no gradient flows
        through it.
    - `denominator`: `*batch q_heads q_len`: the sum of exp(x - max_logits).
    """

    numerator: Float[Array, "*batch q_len q_heads v_dim"]
    max_logits: Float[Array, "*batch q_heads q_len"]
    denominator: Float[Array, "*batch q_heads q_len"]

    @checked
    def merge(self, other: "PartialAttention") -> "PartialAttention":
        """The pieces over the keys of both, which must have none in common.

        **Raises:** `ValueError` if the two are not of one shape.
        """
        check_is_a("other", other, PartialAttention)
        own, others = self.numerator, other.numerator
        if own.shape != others.shape or own.dtype != others.dtype:
            raise ValueError(
                f"other has a numerator of shape {others.shape} and {others.dtype}, "
                f"but needs {own.shape} and {own.dtype}, as the one it is merged with"
            )
        state = merge(self._state(), other._state())
        return PartialAttention(
            _rows_last(state.numerator), state.max_logits, state.denominator
        )

    @checked
    def finish(self) -> tuple[Out, Lse]:
        """The output and lse: 0 and -inf for a query that has met no key."""
        out, lse = finish(self._state())
        return _rows_last(out), lse

    def _state(self) -> SoftmaxState:
        return SoftmaxState(
            jnp.swapaxes(self.numerator, -2, -3), self.max_logits, self.denominator
        )

    @staticmethod
    def from_state(
        state: SoftmaxState, batch_shape: tuple[int, ...]
    ) -> "PartialAttention":
        """In the caller's layout."""
        return PartialAttention(
            queries_by_position(state.numerator, batch_shape),
            rows_by_head(state.max_logits, batch_shape),
            rows_by_head(state.denominator, batch_shape),
        )


@checked
def merge_attention(outputs: Sequence[Out], lses: Sequence[Lse]) -> tuple[Out, Lse]:
    r"""Joins normalised attention over disjoint sets of keys.

    $$o = \sum_i e^{\ell_i - \ell} o_i, \qquad \ell = \log \sum_i e^{\ell_i}$$

    **Arguments:**

    - `outputs`: each `*batch q_len q_heads v_dim`, of one shape.
    - `lses`: each `*batch q_heads q_len`. A part with lse = -inf is empty and drops
        out, whatever its output.

    **Returns:** the output, of the dtype of the first, and lse. Both have gradients
    with respect to all outputs and lses.

    **Raises:** `ValueError` if there are no parts, or not as many lses as
    outputs, or if they are of several shapes.
    """
    if len(outputs) == 0 or len(outputs) != len(lses):
        raise ValueError(
            f"outputs has {len(outputs)} parts and lses {len(lses)}, but both need one "
            "for each part, and there must be a part"
        )
    shape = outputs[0].shape
    for out, lse in zip(outputs, lses, strict=True):
        rows = (*out.shape[:-3], out.shape[-2], out.shape[-3])
        if out.shape != shape or lse.shape != rows:
            raise ValueError(
                f"outputs and lses have a part of shapes {out.shape} and {lse.shape}, "
                f"but as outputs[0] has {shape}, all need that and "
                f"{(*shape[:-3], shape[-2], shape[-3])}"
            )
    dtype = accumulation_dtype(*outputs, *lses)
    stacked = jnp.stack([lse.astype(dtype) for lse in lses])
    highest = finite(lax.stop_gradient(jnp.max(stacked, axis=0)))
    weights = jnp.exp(stacked - highest[None])
    state = SoftmaxState(sum_parts(weights, outputs), highest, jnp.sum(weights, axis=0))
    out, lse = finish(state)
    return _rows_last(out).astype(outputs[0].dtype), lse


def sum_parts(
    weights: Float[Array, "parts ..."], outputs: Sequence[Array]
) -> Float[Array, "... v_dim"]:
    """The weighted sum of outputs, rows before the width; empty parts left out."""
    total = jnp.zeros((), weights.dtype)
    for weight, out in zip(weights, outputs, strict=True):
        rows = jnp.swapaxes(out, -2, -3).astype(weights.dtype)
        rows = jnp.where((weight > 0)[..., None], rows, jnp.zeros_like(rows))
        total = total + weight[..., None] * rows
    return total


def _rows_last(x: Float[Array, "*batch rows length dim"]) -> Float[Array, "..."]:
    """Between `*batch q_heads q_len v_dim` and `*batch q_len q_heads v_dim`."""
    return jnp.swapaxes(x, -2, -3)

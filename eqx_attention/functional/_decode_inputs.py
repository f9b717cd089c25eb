"""From what a caller of a decode function writes to what the decode core computes."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Integer

from .._config import (
    Precision,
    check_int,
    check_logits_dtype,
    check_num_sink_tokens,
    check_soft_cap,
    window_bounds,
)
from .._typing import Number, Window, debug_error_if, int32
from ._caches import Cache
from ._checks import (
    check_broadcasts,
    check_heads,
    check_sink_bias,
    check_softmax_aux,
    debug_check_nan,
)
from ._decode_core import decode_state
from ._inputs import scale_array, softmax_dtype
from ._layout import (
    flat_batch,
    matrix,
    per_head,
    queries_by_head,
    queries_by_position,
    rows_by_head,
)
from ._logits import LogitRules, ScoreParameters
from ._online_softmax import absorb_sinks, finish
from ._visibility import Positions, Visibility


class DecodeInputs(eqx.Module):
    """The arguments of ragged and paged decoding, checked."""

    query: Float[Array, "*batch q_len q_heads qk_dim"]
    cache: Cache
    sequence_start: Integer[Array, "*batch"]
    sequence_end: Integer[Array, "*batch"]
    mask: Bool[Array, "..."] | Integer[Array, "..."] | None
    bias: Float[Array, "..."] | None
    softmax_aux: Float[Array, "..."] | None
    sink_bias: Float[Array, "..."] | None
    softmax_scale: Float[Array, ""]
    sliding_window: tuple[int | None, int | None] = eqx.field(static=True)
    num_sink_tokens: int = eqx.field(static=True)
    logits_soft_cap: Number | None = eqx.field(static=True)
    logits_dtype: DTypeLike = eqx.field(static=True)
    precision: Precision = eqx.field(static=True)
    one_token: bool = eqx.field(static=True)

    def __init__(
        self,
        query: Array,
        cache: Cache,
        sequence_start: Array,
        sequence_end: Array,
        *,
        sliding_window: Window | None,
        softmax_scale: Number | Array | None,
        logits_soft_cap: Number | None,
        softmax_aux: Array | None,
        num_sink_tokens: int,
        sink_bias: Array | None,
        mask: Array | None,
        bias: Array | None,
        logits_dtype: DTypeLike,
        precision: Precision,
    ) -> None:
        batch_shape = sequence_end.shape
        self.one_token = query.ndim == len(batch_shape) + 2
        if query.shape[: len(batch_shape)] != batch_shape or query.ndim not in (
            len(batch_shape) + 2,
            len(batch_shape) + 3,
        ):
            raise ValueError(
                f"query has shape {query.shape}, but needs (*batch, q_heads, qk_dim) "
                "or (*batch, q_len, q_heads, qk_dim), with *batch = "
                f"{batch_shape}, the shape of sequence_end"
            )
        if self.one_token:
            query = jnp.expand_dims(query, -3)
        kv_heads, qk_dim = cache.kv_heads, cache.qk_dim
        check_heads(query.shape[-2], kv_heads, qk_dim)
        if query.shape[-1] != qk_dim:
            raise ValueError(
                f"query has heads of width {query.shape[-1]}, but the keys have heads "
                f"of width {qk_dim}"
            )
        check_num_sink_tokens(num_sink_tokens)
        check_logits_dtype(logits_dtype)
        check_soft_cap(logits_soft_cap, logits_dtype)
        q_len, q_heads = query.shape[-3:-1]
        check_softmax_aux(softmax_aux, q_heads)
        check_sink_bias(sink_bias, num_sink_tokens, q_heads)
        shape = (*batch_shape, q_heads, q_len, cache.capacity)
        check_broadcasts("mask", mask, shape, kv_heads)
        check_broadcasts("bias", bias, shape, kv_heads)
        self.query, self.cache = query, cache
        self.sequence_start, self.sequence_end = sequence_start, sequence_end
        self.mask, self.bias, self.softmax_aux = mask, bias, softmax_aux
        self.sink_bias = None if num_sink_tokens == 0 else sink_bias
        self.softmax_scale = scale_array(softmax_scale, query)
        self.sliding_window = window_bounds(sliding_window)
        self.num_sink_tokens = num_sink_tokens
        self.logits_soft_cap = logits_soft_cap
        self.logits_dtype = softmax_dtype(logits_dtype, query)
        self.precision = precision

    def attend(self) -> tuple[Array, Array]:
        """Output and lse, in the caller's layout and dtype."""
        batch_shape, kv_heads = self.sequence_end.shape, self.cache.kv_heads
        q_heads = self.query.shape[-2]
        parameters = ScoreParameters(
            self.softmax_scale,
            matrix(self.bias, batch_shape, q_heads, kv_heads),
            per_head(self.sink_bias, q_heads, kv_heads),
        )
        rules = LogitRules(
            self._visibility(), self.logits_soft_cap, self.logits_dtype, self.precision
        )
        query = queries_by_head(self.query, kv_heads)
        state = decode_state(query, self.cache, parameters, rules)
        sinks = per_head(self.softmax_aux, q_heads, kv_heads)
        if sinks is not None:
            state = absorb_sinks(state, sinks[None, :, :, None])
        out, lse = finish(state)
        out = queries_by_position(out, batch_shape).astype(self.query.dtype)
        out = debug_check_nan(out, self)
        lse = rows_by_head(lse, batch_shape)
        return (out[..., 0, :, :], lse[..., 0]) if self.one_token else (out, lse)

    def _visibility(self) -> Visibility:
        """Positions count from each sequence's start."""
        capacity, q_len = self.cache.capacity, self.query.shape[-3]
        start = int32("sequence_start", self.sequence_start)
        end = int32("sequence_end", self.sequence_end)
        end = debug_error_if(
            end,
            (start < 0) | (start > end) | (end > capacity),
            "sequence_start and sequence_end must satisfy 0 <= start <= end <= "
            f"capacity, and capacity is {capacity}",
        )
        start = flat_batch(jnp.maximum(start, 0), self.sequence_end.shape, 0)
        end = flat_batch(jnp.minimum(end, capacity), self.sequence_end.shape, 0)
        left, right = self.sliding_window
        return Visibility(
            q_positions=Positions(end - q_len - start, None),
            kv_positions=Positions(-start, None),
            segments=None,
            mask=matrix(
                self.mask,
                self.sequence_end.shape,
                self.query.shape[-2],
                self.cache.kv_heads,
            ),
            kv_range=(start, end),
            q_len=q_len,
            kv_len=capacity,
            left=left,
            right=0 if right is None else min(right, 0),
            num_sink_tokens=self.num_sink_tokens,
        )


def check_block_size(block_size: int | None, default: int) -> int:
    """Keys at a time: a positive int."""
    if block_size is None:
        return default
    check_int("block_size", block_size)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, but must be at least 1")
    return block_size


@eqx.filter_jit
def decode(inputs: DecodeInputs) -> tuple[Array, Array]:
    """Output and lse."""
    return inputs.attend()

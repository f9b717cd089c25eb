"""From what a caller writes to what the backends compute with."""

import math

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Integer, PRNGKeyArray

from .._config import (
    FURTHEST,
    Alignment,
    ChunkSizes,
    Precision,
    check_dropout_prob,
    check_int,
    check_logits_dtype,
    check_num_sink_tokens,
    check_scale,
    check_soft_cap,
    default_chunk_sizes,
    window_bounds,
)
from .._jax import accumulation_dtype
from .._typing import Number, Window, int32
from ..masks import Dense, Documents, Segments, SinkTokens, SlidingWindow
from ..scores import Bias, SoftCap
from ._checks import (
    both_sides,
    check_batch,
    check_heads,
    check_ids,
    check_sink_bias,
    check_softmax_aux,
    debug_check_nan,
)
from ._dropout import Dropout
from ._layout import (
    flat_batch,
    keys_by_head,
    per_head,
    queries_by_head,
    queries_by_position,
    rows_by_head,
)
from ._logits import LogitRules
from ._mask import AbstractMask, LogitsShape, intersection
from ._online_softmax import SoftmaxState, absorb_sinks, finish
from ._positions import Positions, sequences
from ._problem import Operands, Problem
from ._score import AbstractScore, ScoreParameters, SinkBias, chain
from ._visibility import Visibility


class Inputs(eqx.Module):
    """The arguments that standard and flash attention share, checked.

    All that a shape string cannot say is said here, while tracing.
    """

    query: Float[Array, "*batch q_len q_heads qk_dim"]
    key: Float[Array, "*batch kv_len kv_heads qk_dim"]
    value: Float[Array, "*batch kv_len kv_heads v_dim"]
    mask: AbstractMask | None
    score: AbstractScore | None
    softmax_aux: Float[Array, "..."] | None
    sink_bias: Float[Array, "..."] | None
    q_segment_ids: Integer[Array, "..."] | None
    kv_segment_ids: Integer[Array, "..."] | None
    cum_seqlens_q: Integer[Array, " offsets"] | None
    cum_seqlens_k: Integer[Array, " offsets"] | None
    query_offset: Integer[Array, "..."] | None
    softmax_scale: Float[Array, ""]
    dropout_key: PRNGKeyArray | None
    causal: bool = eqx.field(static=True)
    sliding_window: tuple[int | None, int | None] = eqx.field(static=True)
    alignment: Alignment = eqx.field(static=True)
    num_sink_tokens: int = eqx.field(static=True)
    dropout_prob: Number = eqx.field(static=True)
    logits_dtype: DTypeLike = eqx.field(static=True)
    precision: Precision = eqx.field(static=True)

    def __init__(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        mask: AbstractMask | Array | None,
        bias: AbstractScore | Array | None,
        softmax_aux: Array | None,
        num_sink_tokens: int,
        sink_bias: Array | None,
        causal: bool,
        sliding_window: Window | None,
        alignment: Alignment,
        query_offset: int | Array | None,
        q_segment_ids: Array | None,
        kv_segment_ids: Array | None,
        cum_seqlens_q: Array | None,
        cum_seqlens_k: Array | None,
        softmax_scale: Number | Array | None,
        logits_soft_cap: Number | None,
        dropout_prob: Number,
        dropout_key: PRNGKeyArray | None,
        logits_dtype: DTypeLike,
        precision: Precision,
    ) -> None:
        check_batch(query, key)
        check_heads(query.shape[-2], key.shape[-2], query.shape[-1])
        check_num_sink_tokens(num_sink_tokens)
        check_logits_dtype(logits_dtype)
        check_soft_cap(logits_soft_cap, logits_dtype)
        check_dropout_prob(dropout_prob)
        if dropout_prob > 0 and dropout_key is None:
            raise ValueError(
                f"dropout_prob is {dropout_prob}, but dropout_key is None: dropout "
                "needs a PRNG key"
            )
        check_softmax_aux(softmax_aux, query.shape[-2])
        check_sink_bias(sink_bias, num_sink_tokens, query.shape[-2])
        q_segment_ids, kv_segment_ids = both_sides(
            "segment_ids", q_segment_ids, kv_segment_ids, query, key
        )
        batch_shape = key.shape[:-3]
        check_ids("q_segment_ids", q_segment_ids, batch_shape, query.shape[-3])
        check_ids("kv_segment_ids", kv_segment_ids, batch_shape, key.shape[-3])
        cum_seqlens_q, cum_seqlens_k = both_sides(
            "cum_seqlens", cum_seqlens_q, cum_seqlens_k, query, key
        )
        if q_segment_ids is not None and cum_seqlens_q is not None:
            raise ValueError(
                "cum_seqlens_q and q_segment_ids are both given, but each says which "
                "tokens belong together: give one of them"
            )
        if (
            cum_seqlens_q is not None
            and cum_seqlens_k is not None
            and cum_seqlens_q.shape != cum_seqlens_k.shape
        ):
            raise ValueError(
                f"cum_seqlens_q has {cum_seqlens_q.shape[0]} offsets and cum_seqlens_k "
                f"{cum_seqlens_k.shape[0]}, but both need one for each sequence and "
                "one more"
            )
        if cum_seqlens_q is not None and cum_seqlens_q.shape[0] == 0:
            raise ValueError(
                "cum_seqlens_q has no offsets, but needs one for each sequence and one "
                "more: [0] means no sequence"
            )
        self.query, self.key, self.value = query, key, value
        self.mask, self.score = as_mask(mask), as_score(bias, logits_soft_cap)
        self.softmax_aux = softmax_aux
        self.sink_bias = None if num_sink_tokens == 0 else sink_bias
        self.q_segment_ids, self.kv_segment_ids = q_segment_ids, kv_segment_ids
        self.cum_seqlens_q, self.cum_seqlens_k = cum_seqlens_q, cum_seqlens_k
        self.query_offset = None if query_offset is None else offset_array(query_offset)
        self.softmax_scale = scale_array(softmax_scale, query)
        self.dropout_key = None if dropout_prob == 0 else dropout_key
        self.causal, self.alignment = causal, alignment
        self.sliding_window = window_bounds(sliding_window)
        self.num_sink_tokens = num_sink_tokens
        self.dropout_prob = float(dropout_prob)
        self.logits_dtype = softmax_dtype(logits_dtype, query)
        self.precision = precision

    @property
    def _shape(self) -> LogitsShape:
        """The sizes of the logits."""
        q_len, q_heads = self.query.shape[-3:-1]
        kv_len, kv_heads = self.key.shape[-3:-1]
        return LogitsShape(self.batch_shape, q_heads, kv_heads, q_len, kv_len)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.query.shape[:-3]

    def default_chunk_sizes(self) -> ChunkSizes:
        """Those for these shapes and rules."""
        q_len, q_heads = self.query.shape[-3:-1]
        kv_len, kv_heads = self.key.shape[-3:-1]
        rule = self._rule()
        return default_chunk_sizes(
            q_len,
            kv_len,
            q_heads // max(kv_heads, 1),
            local=rule is not None and rule.is_local,
        )

    def problem(self) -> Problem:
        """The same attention with heads before lengths and one batch axis."""
        kv_heads = self.key.shape[-2]
        operands = Operands(
            queries_by_head(self.query, kv_heads),
            keys_by_head(self.key),
            keys_by_head(self.value),
            ScoreParameters(
                self.softmax_scale,
                bound_score(self.score, self.sink_bias, self._shape),
            ),
        )
        rules = LogitRules(self._visibility(), self.logits_dtype, self.precision)
        dropout = None
        if self.dropout_key is not None:
            dropout = Dropout.of(
                self.dropout_key, operands.query.shape[0], self.dropout_prob
            )
        return Problem(operands, rules, dropout)

    def results(self, state: SoftmaxState) -> tuple[Array, Array]:
        """Output and lse, in the caller's layout and dtype."""
        out, lse = finish(self.with_sinks(state))
        out = queries_by_position(out, self.batch_shape).astype(self.query.dtype)
        out = debug_check_nan(out, self)
        return out, rows_by_head(lse, self.batch_shape)

    def with_sinks(self, state: SoftmaxState) -> SoftmaxState:
        """The state after the sink logits as well; they count once, whatever walked."""
        sinks = per_head(self.softmax_aux, self.query.shape[-2], self.key.shape[-2])
        return state if sinks is None else absorb_sinks(state, sinks[None, :, :, None])

    def _visibility(self) -> Visibility:
        shape, rule, q_within, kv_within = self._shape, self._rule(), None, None
        if self.cum_seqlens_q is not None and self.cum_seqlens_k is not None:
            q_within, kv_within = self._within(self.cum_seqlens_q, self.cum_seqlens_k)
        return Visibility(
            q_positions=Positions(self._offset(shape.q_len, shape.kv_len), q_within),
            kv_positions=Positions(jnp.zeros(1, jnp.int32), kv_within),
            mask=None if rule is None else rule.bind(shape),
            q_len=shape.q_len,
            kv_len=shape.kv_len,
        )

    def _rule(self) -> AbstractMask | None:
        """All that says which pairs may attend, as one mask."""
        together = None
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            together = Segments(
                int32("q_segment_ids", self.q_segment_ids),
                int32("kv_segment_ids", self.kv_segment_ids),
            )
        if self.cum_seqlens_q is not None:
            together = Documents(self.cum_seqlens_q, self.cum_seqlens_k)
        window = window_mask(
            self.sliding_window, causal=self.causal, num_sinks=self.num_sink_tokens
        )
        return intersection(window, together, self.mask)

    def _offset(self, q_len: int, kv_len: int) -> Int[Array, " batch"]:
        if self.query_offset is not None:
            return flat_batch(self.query_offset, self.batch_shape, 0)
        aligned = self.alignment is Alignment.BOTTOM_RIGHT
        if aligned and self.cum_seqlens_q is None:
            return jnp.full(1, kv_len - q_len, jnp.int32)
        return jnp.zeros(1, jnp.int32)

    def _within(
        self,
        cum_seqlens_q: Integer[Array, " offsets"],
        cum_seqlens_k: Integer[Array, " offsets"],
    ) -> tuple[Array, Array]:
        """The positions of queries, and of keys, within their sequences."""
        q_starts = int32("cum_seqlens_q", cum_seqlens_q)
        kv_starts = int32("cum_seqlens_k", cum_seqlens_k)
        q_ids, q_within = sequences(q_starts, self.query.shape[-3])
        _, kv_within = sequences(kv_starts, self.key.shape[-3])
        if self.alignment is Alignment.BOTTOM_RIGHT and self.query_offset is None:
            extra = jnp.diff(kv_starts) - jnp.diff(q_starts)
            if extra.shape[0] > 0:
                q_within = q_within + jnp.take(extra, jnp.maximum(q_ids, 0), axis=0)
        return q_within[None], kv_within[None]


def as_mask(mask: AbstractMask | Array | None) -> AbstractMask | None:
    """A mask, or an array as one."""
    return Dense(mask) if isinstance(mask, Array) else mask


def as_score(
    bias: AbstractScore | Array | None, logits_soft_cap: Number | None
) -> AbstractScore | None:
    """A soft cap, and then a score, or an array as one."""
    cap = None if logits_soft_cap is None else SoftCap(logits_soft_cap)
    return chain(cap, Bias(bias) if isinstance(bias, Array) else bias)


def bound_score(
    score: AbstractScore | None, sink_bias: Array | None, shape: LogitsShape
) -> AbstractScore | None:
    """The score, and then the bias of sink tokens, for these sizes."""
    bias = per_head(sink_bias, shape.q_heads, shape.kv_heads)
    return chain(
        None if score is None else score.bind(shape),
        None if bias is None else SinkBias(bias[None]),
    )


def window_mask(
    window: tuple[int | None, int | None], *, causal: bool, num_sinks: int
) -> AbstractMask | None:
    """A window whose left bound sink tokens may pass; causality is a right one."""
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    if num_sinks == 0 or left is None:
        return None if (left, right) == (None, None) else SlidingWindow(left, right)
    near = SlidingWindow(left, None) | SinkTokens(num_sinks)
    return intersection(near, None if right is None else SlidingWindow(None, right))


def scale_array(softmax_scale: Number | Array | None, query: Array) -> Array:
    """The scale as an array; by default 1 / sqrt(qk_dim)."""
    dtype = accumulation_dtype(query)
    if softmax_scale is None:
        softmax_scale = 1 / math.sqrt(query.shape[-1])
    if isinstance(softmax_scale, Array):
        return softmax_scale.astype(dtype)
    check_scale(softmax_scale)
    return jnp.asarray(softmax_scale, dtype)


def offset_array(query_offset: int | Array) -> Array:
    """The offset as int32. Further away than any token can be, it matters no more."""
    if isinstance(query_offset, Array):
        highest = min(FURTHEST, jnp.iinfo(query_offset.dtype).max)
        lowest = max(-FURTHEST, jnp.iinfo(query_offset.dtype).min)
        return jnp.clip(query_offset, lowest, highest).astype(jnp.int32)
    check_int("query_offset", query_offset)
    return jnp.asarray(max(-FURTHEST, min(query_offset, FURTHEST)), jnp.int32)


def softmax_dtype(logits_dtype: DTypeLike, query: Array) -> DTypeLike:
    """The dtype of logits: a float64 query is not cut to a default of float32."""
    dtype = jnp.dtype(logits_dtype)
    return accumulation_dtype(query) if dtype == jnp.float32 else dtype

"""From what a caller of a decode function writes to what the decode core computes."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Integer

from .._config import (
    FURTHEST,
    Precision,
    check_int,
    check_logits_dtype,
    check_num_sink_tokens,
    check_soft_cap,
    window_bounds,
)
from .._typing import (
    Bias,
    Mask,
    Number,
    Scale,
    SinkBias,
    SinkLogits,
    Window,
    check_values,
    checked,
    int32,
)
from ._caches import Cache
from ._checks import (
    check_heads,
    check_sink_bias,
    check_softmax_aux,
    debug_check_nan,
)
from ._decode_core import decode_state
from ._decode_masks import Drafts, Slots, split_drafts
from ._inputs import (
    as_mask,
    as_score,
    bound_score,
    scale_array,
    softmax_dtype,
    window_mask,
)
from ._layout import (
    flat_batch,
    per_head,
    queries_by_head,
    queries_by_position,
    rows_by_head,
)
from ._logits import LogitRules
from ._mask import AbstractMask, LogitsShape, intersection
from ._online_softmax import absorb_sinks, finish
from ._positions import Positions
from ._score import AbstractScore, ScoreParameters
from ._visibility import Visibility

NOWHERE = FURTHEST - 1
"""As a position: after all tokens, or if negative, before all."""


class DecodeInputs(eqx.Module):
    """The arguments of decoding, checked.

    `num_tokens` is how many of the queries are real, None if all are. `kv_positions`
    says where the key of each slot stands, counted from the sequence's start; None if
    they stand in a row. With them, `sequence_end` may be more than the capacity.
    """

    query: Float[Array, "*batch q_len q_heads qk_dim"]
    cache: Cache
    sequence_start: Integer[Array, "*batch"]
    sequence_end: Integer[Array, "*batch"]
    num_tokens: Integer[Array, "*batch"] | None
    kv_positions: Int[Array, "flat_batch capacity"] | None
    mask: AbstractMask | None
    drafts: Bool[Array, "#flat_batch q_len q_len"] | None
    score: AbstractScore | None
    softmax_aux: Float[Array, "..."] | None
    sink_bias: Float[Array, "..."] | None
    softmax_scale: Float[Array, ""]
    sliding_window: tuple[int | None, int | None] = eqx.field(static=True)
    num_sink_tokens: int = eqx.field(static=True)
    logits_dtype: DTypeLike = eqx.field(static=True)
    precision: Precision = eqx.field(static=True)
    one_token: bool = eqx.field(static=True)

    @checked
    def __init__(
        self,
        query: Float[Array, "... q_heads qk_dim"],
        cache: Cache,
        sequence_start: Integer[Array, "*batch"],
        sequence_end: Integer[Array, "*batch"],
        num_tokens: Integer[Array, "*batch"] | None = None,
        kv_positions: Int[Array, "flat_batch capacity"] | None = None,
        *,
        sliding_window: Window | None = None,
        softmax_scale: Scale | None = None,
        logits_soft_cap: Number | None = None,
        softmax_aux: SinkLogits | None = None,
        num_sink_tokens: int = 0,
        sink_bias: SinkBias | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
        logits_dtype: DTypeLike = jnp.float32,
        precision: Precision = None,
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
        self.query, self.cache = query, cache
        start = int32("sequence_start", sequence_start)
        end = int32("sequence_end", sequence_end)
        wrong, most = (start < 0) | (start > end), ""
        if kv_positions is None:
            wrong = wrong | (end > cache.capacity)
            most = f" <= capacity, and capacity is {cache.capacity}"
        self.sequence_start = start
        self.sequence_end = check_values(
            end,
            wrong,
            "sequence_start and sequence_end must satisfy 0 <= start <= end" + most,
            sequence_start=start,
            sequence_end=end,
        )
        self.num_tokens = check_num_tokens(num_tokens, q_len)
        self.kv_positions = kv_positions
        drafts, mask = split_drafts(mask, batch_shape, q_len, cache.capacity)
        self.mask, self.drafts = as_mask(mask), drafts
        self.score, self.softmax_aux = as_score(bias, logits_soft_cap), softmax_aux
        self.sink_bias = None if num_sink_tokens == 0 else sink_bias
        self.softmax_scale = scale_array(softmax_scale, query)
        self.sliding_window = window_bounds(sliding_window)
        self.num_sink_tokens = num_sink_tokens
        self.logits_dtype = softmax_dtype(logits_dtype, query)
        self.precision = precision

    def attend(self) -> tuple[Array, Array]:
        """Output and lse, in the caller's layout and dtype."""
        batch_shape, kv_heads = self.sequence_end.shape, self.cache.kv_heads
        q_heads = self.query.shape[-2]
        shape = LogitsShape(
            *(batch_shape, q_heads, kv_heads),
            *(self.query.shape[-3], self.cache.capacity),
        )
        parameters = ScoreParameters(
            self.softmax_scale, bound_score(self.score, self.sink_bias, shape)
        )
        rules = LogitRules(self._visibility(shape), self.logits_dtype, self.precision)
        query = queries_by_head(self.query, kv_heads)
        state = decode_state(query, self.cache, parameters, rules)
        sinks = per_head(self.softmax_aux, q_heads, kv_heads)
        if sinks is not None:
            state = absorb_sinks(state, sinks[None, :, :, None])
        out, lse = finish(state)
        out = queries_by_position(out, batch_shape).astype(self.query.dtype)
        out = debug_check_nan(out, self)
        lse = rows_by_head(lse, batch_shape)
        if self.num_tokens is not None:
            # Padding sees no sinks either.
            num_tokens = self.num_tokens[..., None, None]
            rows = jnp.arange(lse.shape[-1], dtype=jnp.int32)
            real = jnp.broadcast_to(rows, (*num_tokens.shape[:-1], rows.size))
            real = real < num_tokens
            lse = jnp.where(real, lse, jnp.full_like(lse, -jnp.inf))
        return (out[..., 0, :, :], lse[..., 0]) if self.one_token else (out, lse)

    def _visibility(self, shape: LogitsShape) -> Visibility:
        """Positions count from each sequence's start."""
        start = flat_batch(jnp.maximum(self.sequence_start, 0), shape.batch, 0)
        end = flat_batch(self.sequence_end, shape.batch, 0)
        slots = None
        if self.kv_positions is None:
            end = jnp.minimum(end, shape.kv_len)
            slots = Slots(start, end)
            kv_positions = Positions(-start, None)
        else:
            kv_positions = Positions(jnp.zeros_like(start), self.kv_positions)
        window = window_mask(
            self.sliding_window, causal=True, num_sinks=self.num_sink_tokens
        )
        mask = None if self.mask is None else self.mask.bind(shape)
        queries = jnp.arange(shape.q_len, dtype=jnp.int32)[None]
        num_tokens = shape.q_len
        if self.num_tokens is not None:
            num_tokens = flat_batch(self.num_tokens, shape.batch, 0)[:, None]
        first, drafts = (end - start)[:, None] - num_tokens, None
        if self.drafts is not None:
            # A draft stands where it will stand if it is taken: below its ancestors.
            number = kv_positions.at(jnp.int32(0), shape.kv_len)
            real = (queries < num_tokens)[:, None]
            drafts = Drafts(self.drafts & real, number - first)
            kv_positions = Positions(jnp.zeros_like(start), drafts.place(number, first))
            queries = drafts.depths
        within = first + queries
        if self.num_tokens is not None:
            # Padding stands before all keys, so it sees none.
            real = jnp.arange(shape.q_len, dtype=jnp.int32)[None] < num_tokens
            within = jnp.where(real, within, -NOWHERE)
        return Visibility(
            q_positions=Positions(jnp.zeros_like(start), within),
            kv_positions=kv_positions,
            mask=intersection(window, slots, drafts, mask),
            q_len=shape.q_len,
            kv_len=shape.kv_len,
        )


def check_num_tokens(
    num_tokens: Integer[Array, "*batch"] | None, num_rows: int
) -> Int[Array, "*batch"] | None:
    """How many rows are tokens, as int32 that are not negative nor more than there are.

    Where traced numbers are out of range, they count as the nearest in it.
    """
    if num_tokens is None:
        return None
    num_tokens = int32("num_tokens", num_tokens)
    num_tokens = check_values(
        num_tokens,
        (num_tokens < 0) | (num_tokens > num_rows),
        f"num_tokens must lie between 0 and {num_rows}, the number of rows",
        num_tokens=num_tokens,
    )
    return jnp.clip(num_tokens, 0, num_rows)


def check_block_size(block_size: int | None) -> int:
    """Keys at a time: a positive int, by default 256."""
    if block_size is None:
        return 256
    check_int("block_size", block_size)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, but must be at least 1")
    return block_size


@eqx.filter_jit
def decode(inputs: DecodeInputs) -> tuple[Array, Array]:
    """Output and lse."""
    return inputs.attend()

"""Ragged decode attention: each sequence of a batch has its own start and end."""

from typing import Literal, Unpack, overload

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Integer

from .._config import Precision
from .._typing import (
    Bias,
    Key,
    Mask,
    Number,
    Scale,
    SinkBias,
    SinkLogits,
    Value,
    Window,
    checked,
)
from ._caches import ContiguousCache
from ._decode_inputs import DecodeInputs, check_block_size, decode
from ._options import ScoreOptions


@overload
def ragged_decode_attention(
    query: Float[Array, "... q_heads qk_dim"],
    key: Key,
    value: Value,
    sequence_start: Integer[Array, "*batch"],
    sequence_end: Integer[Array, "*batch"],
    *,
    block_size: int | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[ScoreOptions],
) -> Float[Array, "... q_heads v_dim"]: ...
@overload
def ragged_decode_attention(
    query: Float[Array, "... q_heads qk_dim"],
    key: Key,
    value: Value,
    sequence_start: Integer[Array, "*batch"],
    sequence_end: Integer[Array, "*batch"],
    *,
    block_size: int | None = None,
    return_lse: Literal[True],
    **options: Unpack[ScoreOptions],
) -> tuple[Float[Array, "... q_heads v_dim"], Float[Array, "..."]]: ...
@checked
def ragged_decode_attention(
    query: Float[Array, "... q_heads qk_dim"],
    key: Key,
    value: Value,
    sequence_start: Integer[Array, "*batch"],
    sequence_end: Integer[Array, "*batch"],
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
    block_size: int | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "... q_heads v_dim"]
    | tuple[Float[Array, "... q_heads v_dim"], Float[Array, "..."]]
):
    """Attention of the last tokens of each sequence to its part of a cache.

    The query's tokens are the last q_len of the sequence [start, end): token t stands
    at position end - q_len + t and sees the keys from start up to itself. Only blocks
    of keys between start and end are read, so the cost follows the sum of the lengths.

    **Arguments:**

    - `query`: `*batch q_heads qk_dim` (one token) or `*batch q_len q_heads qk_dim`.
    - `key`, `value`: the cache, `*batch capacity kv_heads qk_dim` and `*batch capacity
        kv_heads v_dim`. Slots outside [start, end) may hold anything, NaN included.
    - `sequence_start`, `sequence_end`: integers, `*batch`, with 0 <= start <= end <=
        capacity. Where their values are known, others are a `ValueError`; traced ones
        are an error in the debugging mode, and without it nothing outside the cache is
        read all the same.
    - `sliding_window`: counts from each token's own position.
    - `num_sink_tokens`: the first n keys from start on.
    - `mask`, `bias`: broadcastable to `*batch q_heads q_len capacity`, or an
        `AbstractMask` and an `AbstractScore`, for which positions count from the start.
        A mask `*batch 1 q_len q_len`, with fewer columns than the cache has slots, is a
        tree of drafts, the last q_len keys (Miao et al. 2023, arXiv 2305.09781): each
        sees those that its row says, itself among them, and all keys before the drafts.
        It stands where it would stand if it were taken: after as many of them as it
        sees.
    - `block_size`: keys at a time; by default 256, or the capacity if that is less.
    - The rest is as in [`eqx_attention.standard_attention`][].

    **Returns:**

    The output, shaped like the query with v_dim, of the query's dtype; with
    `return_lse` also lse, `*batch q_heads` or `*batch q_heads q_len`, float32 or wider.
    An empty sequence has output 0 and lse -inf, or that of the sinks.

    **Raises:**

    As [`eqx_attention.standard_attention`][]; and `ValueError` if the query's rank is
    neither the cache's nor one less, or for a start or an end out of range.
    """
    size = check_block_size(block_size)
    inputs = DecodeInputs(
        query,
        ContiguousCache.of(key, value, max(1, min(size, key.shape[-3]))),
        sequence_start,
        sequence_end,
        sliding_window=sliding_window,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        softmax_aux=softmax_aux,
        num_sink_tokens=num_sink_tokens,
        sink_bias=sink_bias,
        mask=mask,
        bias=bias,
        logits_dtype=logits_dtype,
        precision=precision,
    )
    out, lse = decode(inputs)
    return (out, lse) if return_lse else out

"""Ragged decode attention over pages."""

from typing import Literal, Unpack, overload

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Integer

from .._config import Precision
from .._typing import (
    Bias,
    KeyPages,
    Mask,
    Number,
    PageTable,
    Scale,
    SinkBias,
    SinkLogits,
    ValuePages,
    Window,
    checked,
)
from ._caches import PagedCache
from ._checks import check_page_table, check_pages
from ._decode_inputs import DecodeInputs, check_block_size, decode
from ._options import ScoreOptions
from ._store import Store


@overload
def paged_decode_attention(
    query: Float[Array, "... q_heads qk_dim"],
    key_pages: KeyPages,
    value_pages: ValuePages,
    page_table: PageTable,
    sequence_start: Integer[Array, "*batch"],
    sequence_end: Integer[Array, "*batch"],
    *,
    block_size: int | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[ScoreOptions],
) -> Float[Array, "... q_heads v_dim"]: ...
@overload
def paged_decode_attention(
    query: Float[Array, "... q_heads qk_dim"],
    key_pages: KeyPages,
    value_pages: ValuePages,
    page_table: PageTable,
    sequence_start: Integer[Array, "*batch"],
    sequence_end: Integer[Array, "*batch"],
    *,
    block_size: int | None = None,
    return_lse: Literal[True],
    **options: Unpack[ScoreOptions],
) -> tuple[Float[Array, "... q_heads v_dim"], Float[Array, "..."]]: ...
@checked
def paged_decode_attention(
    query: Float[Array, "... q_heads qk_dim"],
    key_pages: KeyPages,
    value_pages: ValuePages,
    page_table: PageTable,
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
    """Ragged decode attention over a cache that is kept in pages.

    Key j of a sequence stands in slot `j % page_size` of the page that entry
    `j // page_size` of its row of the table names (Kwon et al. 2023, arXiv 2309.06180).

    **Arguments:**

    - `query`: `*batch q_heads qk_dim` (one token) or `*batch q_len q_heads qk_dim`.
    - `key_pages`, `value_pages`: `num_pages page_size kv_heads qk_dim` and `num_pages
        page_size kv_heads v_dim`, shared by all sequences. What no sequence refers to
        may hold anything, NaN included.
    - `page_table`: `*batch max_pages`, of any integer type. Entries of which no slot
        lies in [start, end) may be any number.
    - `sequence_start`, `sequence_end`: integers, `*batch`, with 0 <= start <= end <=
        max_pages * page_size.
    - `block_size`: keys at a time; whole pages are read, as many as fit in it and at
        least one. By default 256.
    - The rest is as in [`eqx_attention.ragged_decode_attention`][]; the last axis of
        `mask` and `bias` is max_pages * page_size.

    **Returns and raises:** as [`eqx_attention.ragged_decode_attention`][].
    """
    size = check_block_size(block_size)
    check_pages(key_pages)
    page_table = check_page_table(
        page_table,
        key_pages.shape[0],
        key_pages.shape[1],
        sequence_start,
        sequence_end,
    )
    inputs = DecodeInputs(
        query,
        PagedCache.of(
            Store(key_pages, None), Store(value_pages, None), page_table, size
        ),
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

"""What shape strings cannot say of the arguments, said in sentences of its own."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Integer, PyTree

from .._typing import DEBUG, check_values, debug_error_if, int32


def both_sides(
    name: str, q: Array | None, kv: Array | None, query: Array, key: Array
) -> tuple[Array | None, Array | None]:
    """One given alone serves both sides, if these are of one length."""
    if (q is None) == (kv is None):
        return q, kv
    if query.shape[-3] != key.shape[-3]:
        kinds = ("q", "kv" if name == "segment_ids" else "k")
        names = [f"{kinds[0]}_{name}", f"{kinds[1]}_{name}"]
        if name == "cum_seqlens":
            names = ["cum_seqlens_q", "cum_seqlens_k"]
        given, missing = names if kv is None else names[::-1]
        raise ValueError(
            f"{missing} is missing: {given} alone serves both sides only if query and "
            f"key are of one length, and they are {query.shape[-3]} and {key.shape[-3]}"
        )
    both = kv if q is None else q
    return both, both


def check_batch(query: Array, key: Array) -> None:
    """Queries and keys have the same batch axes."""
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(
            f"query has batch axes {query.shape[:-3]} and key {key.shape[:-3]}, but "
            "both need the same"
        )


def check_ids(
    name: str, ids: Array | None, batch_shape: tuple[int, ...], length: int
) -> None:
    """There is an id for each token; batch axes may be left out, or be 1."""
    if ids is None:
        return
    own = ids.shape[:-1]
    fits = len(own) <= len(batch_shape) and ids.shape[-1] == length
    for back in range(1, min(len(own), len(batch_shape)) + 1):
        fits = fits and own[-back] in (1, batch_shape[-back])
    if not fits:
        raise ValueError(
            f"{name} has shape {ids.shape}, but needs (*batch, length) = "
            f"{(*batch_shape, length)}"
        )


def check_offsets(
    name: str, offsets: Integer[Array, " offsets"], length: int
) -> Int[Array, " offsets"]:
    """Offsets as int32, which begin at 0, do not fall and end within the length."""
    offsets = int32(name, offsets)
    wrong = (offsets[0] != 0) | jnp.any(jnp.diff(offsets) < 0) | (offsets[-1] > length)
    return debug_error_if(
        offsets, wrong, f"{name} must begin at 0, not fall, and end by {length}"
    )


def check_heads(q_heads: int, kv_heads: int, qk_dim: int) -> None:
    """Query heads are shared out evenly over key heads, and heads have a width."""
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(
            f"query has {q_heads} heads, which is not a multiple of key's {kv_heads} "
            "heads"
        )
    if qk_dim == 0:
        raise ValueError("query has heads of width 0, but needs a width of 1 or more")


def check_pages(key_pages: Array) -> None:
    """There is a page, and it holds something."""
    if 0 in key_pages.shape[:2]:
        raise ValueError(
            f"key_pages has shape {key_pages.shape}, but needs at least one page with "
            "at least one slot"
        )


def check_page_table(
    page_table: Integer[Array, "*batch max_pages"],
    num_pages: int,
    page_size: int,
    start: Integer[Array, "*batch"],
    end: Integer[Array, "*batch"],
) -> Integer[Array, "*batch max_pages"]:
    """Pages that hold a token of their sequence are there."""
    first = page_size * jnp.arange(page_table.shape[-1], dtype=jnp.int32)
    for _ in start.shape:
        first = first[None]
    start, end = int32("sequence_start", start), int32("sequence_end", end)
    start, end = start[..., None], end[..., None]
    used = (first < end) & (first + page_size > start) & (start < end)
    table = int32("page_table", page_table)
    return check_values(
        table,
        used & ((table < 0) | (table >= num_pages)),
        f"page_table must name pages from 0 to {num_pages - 1} where a sequence has "
        "tokens",
        page_table=table,
    )


def check_softmax_aux(softmax_aux: Array | None, q_heads: int) -> None:
    """Sink logits stand for all heads or for each."""
    if softmax_aux is not None and (
        softmax_aux.ndim not in (1, 2)
        or (softmax_aux.ndim == 2 and softmax_aux.shape[0] != q_heads)
    ):
        raise ValueError(
            f"softmax_aux has shape {softmax_aux.shape}, but needs (num_sinks,) or "
            f"({q_heads}, num_sinks), as query has {q_heads} heads"
        )


def check_sink_bias(
    sink_bias: Array | None, num_sink_tokens: int, q_heads: int
) -> None:
    """The bias of the sink tokens has a number for each of them."""
    if sink_bias is not None and sink_bias.shape not in (
        (num_sink_tokens,),
        (q_heads, num_sink_tokens),
    ):
        raise ValueError(
            f"sink_bias has shape {sink_bias.shape}, but needs ({num_sink_tokens},) or "
            f"({q_heads}, {num_sink_tokens}), as num_sink_tokens is {num_sink_tokens} "
            f"and query has {q_heads} heads"
        )


def check_broadcasts(
    name: str, x: Array | None, shape: tuple[int, ...], kv_heads: int
) -> None:
    """A mask or a bias broadcasts to the logits; its heads may be those of the keys."""
    if x is None:
        return
    fits = x.ndim <= len(shape)
    for back in range(1, min(x.ndim, len(shape)) + 1):
        sizes = (1, shape[-back], kv_heads if back == 3 else 1)
        fits = fits and x.shape[-back] in sizes
    if not fits:
        raise ValueError(
            f"{name} has shape {x.shape}, which does not broadcast to "
            f"(*batch, q_heads, q_len, kv_len) = {shape}"
            + ("" if kv_heads == shape[-3] else f" (or with {kv_heads} kv_heads)")
        )


def debug_check_nan(out: Array, inputs: PyTree) -> Array:
    """`out`; in the debugging mode, NaN that came from finite inputs is an error."""
    if not DEBUG:
        return out
    finite = jnp.asarray(True)
    for x in jax.tree.leaves(eqx.filter(inputs, eqx.is_inexact_array)):
        if jnp.issubdtype(x.dtype, jnp.floating):
            # Minus infinity in a bias forbids a pair, which is no fault.
            finite = finite & jnp.all(jnp.isfinite(x) | jnp.isneginf(x))
    return debug_error_if(
        out,
        finite & jnp.any(jnp.isnan(out)),
        "the output holds NaN, though query, key, value, bias and sinks do not",
    )

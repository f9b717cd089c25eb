"""Attention and its gradients in float64 NumPy, written from the contract alone.

Nothing here is shared with the package, and nothing here is fast: the whole matrix is
made, and the gradients are the formulae one finds with a pencil. The names of the
arguments are the package's. `alignment` is the value of an `Alignment`, `keep` is the
pattern of dropout (True where a weight is kept).
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


class Result(NamedTuple):
    """The output, the log of the sum of exponentials, and the softmax's weights."""

    output: Array
    lse: Array
    weights: Array
    allowed: Array


class _Parts(NamedTuple):
    """All that the forward pass makes, with one batch axis and full heads."""

    query: Array
    key: Array
    value: Array
    dots: Array
    slope: Array
    allowed: Array
    weights: Array
    sink_weights: Array
    dropout: Array
    sink_token: Array
    scale: float
    output: Array
    lse: Array


def attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Any
) -> Result:
    """Attention over `*batch length heads dim`, as the package defines it."""
    query = np.asarray(query)
    batch, rows, value = query.shape[:-3], query.shape[:-1], np.asarray(value)
    p = _forward(query, np.asarray(key), value, **options)
    return Result(
        p.output.transpose(0, 2, 1, 3).reshape(*rows, value.shape[-1]),
        p.lse.reshape(batch + p.lse.shape[1:]),
        p.weights.reshape(batch + p.weights.shape[1:]),
        p.allowed.reshape(batch + p.allowed.shape[1:]),
    )


def gradients(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    output_cotangent: ArrayLike,
    lse_cotangent: ArrayLike | None = None,
    **options: Any,
) -> dict[str, Array]:
    """Gradients of `<output_cotangent, output> + <lse_cotangent, lse>`, by name."""
    query, key, value = (np.asarray(x) for x in (query, key, value))
    p = _forward(query, key, value, **options)
    num_batch, q_heads, q_len, kv_len = p.allowed.shape
    kv_heads = key.shape[-2]
    d_output = np.asarray(output_cotangent, np.float64)
    d_output = d_output.reshape(num_batch, q_len, q_heads, value.shape[-1])
    d_output = d_output.transpose(0, 2, 1, 3)
    d_lse = np.zeros((num_batch, q_heads, q_len))
    if lse_cotangent is not None:
        d_lse = np.asarray(lse_cotangent, np.float64).reshape(d_lse.shape)

    d_value = np.einsum("bhts,bhtv->bhsv", p.weights * p.dropout, d_output)
    d_weights = np.einsum("bhtv,bhsv->bhts", d_output, p.value) * p.dropout
    row_mean = (p.weights * d_weights).sum(-1)
    d_logits = p.weights * (d_weights + (d_lse - row_mean)[..., None])
    d_dots = d_logits * p.slope

    def over_groups(x: Array, shape: tuple[int, ...]) -> Array:
        grouped = x.reshape(
            num_batch, kv_heads, q_heads // kv_heads, kv_len, x.shape[-1]
        )
        return grouped.sum(2).transpose(0, 2, 1, 3).reshape(shape)

    d_query = p.scale * np.einsum("bhts,bhsd->bhtd", d_dots, p.key)
    d_key = p.scale * np.einsum("bhts,bhtd->bhsd", d_dots, p.query)
    found = {
        "query": d_query.transpose(0, 2, 1, 3).reshape(query.shape),
        "key": over_groups(d_key, key.shape),
        "value": over_groups(d_value, value.shape),
        "softmax_scale": (d_dots * p.dots).sum(),
    }
    if options.get("bias") is not None:
        shape = np.shape(options["bias"])
        whole = d_logits.reshape(query.shape[:-3] + d_logits.shape[1:])
        found["bias"] = _sum_to(whole, shape, kv_heads)
    if options.get("sink_bias") is not None:
        d_sink = np.einsum("bhts,bsn->hn", d_logits, p.sink_token)
        found["sink_bias"] = _sum_to(d_sink, np.shape(options["sink_bias"]), 1)
    if options.get("softmax_aux") is not None:
        d_sink = np.einsum("bhtn,bht->hn", p.sink_weights, d_lse - row_mean)
        found["softmax_aux"] = _sum_to(d_sink, np.shape(options["softmax_aux"]), 1)
    return found


def decode(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    sequence_start: ArrayLike,
    sequence_end: ArrayLike,
    **options: Any,
) -> Result:
    """The last tokens of the sequences `[start, end)` of a cache against the cache."""
    query, key = np.asarray(query), np.asarray(key)
    one_token = query.ndim == key.ndim - 1
    if one_token:
        query = query[..., None, :, :]
    found = attention(
        query,
        key,
        value,
        causal=True,
        query_offset=np.asarray(sequence_end) - query.shape[-3],
        sequence_start=sequence_start,
        sequence_end=sequence_end,
        **options,
    )
    if not one_token:
        return found
    output, lse, weights, allowed = found
    return Result(output[..., 0, :, :], lse[..., 0], weights, allowed)


def gather_pages(pages: ArrayLike, page_table: ArrayLike) -> Array:
    """Pages laid in a row: `*batch max_pages*page_size kv_heads dim`; NaN if unused."""
    pages, page_table = np.asarray(pages), np.asarray(page_table)
    found = pages[np.clip(page_table, 0, len(pages) - 1)].astype(np.float64)
    found[(page_table < 0) | (page_table >= len(pages))] = np.nan
    return found.reshape((*page_table.shape[:-1], -1, *pages.shape[2:]))


def merge(outputs: list[Array], lses: list[Array]) -> tuple[Array, Array]:
    """Joins results over disjoint keys: the weights of the parts are a softmax too."""
    stacked = np.stack([np.asarray(lse, np.float64) for lse in lses])
    lse = _log_sum_exp(stacked, 0)
    with np.errstate(invalid="ignore"):
        share = np.where(np.isneginf(stacked), 0.0, np.exp(stacked - lse))
    share = np.swapaxes(share, -1, -2)[..., None]
    return sum(
        s * np.asarray(o, np.float64) for s, o in zip(share, outputs, strict=True)
    ), lse


def _forward(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    num_sink_tokens: int = 0,
    sink_bias: ArrayLike | None = None,
    softmax_scale: Any = None,
    logits_soft_cap: float | None = None,
    keep: ArrayLike | None = None,
    dropout_prob: float = 0.0,
    **visibility: Any,
) -> _Parts:
    batch, (q_len, q_heads, qk_dim) = query.shape[:-3], query.shape[-3:]
    kv_len, _kv_heads = key.shape[-3:-1]
    num_batch = int(np.prod(batch, dtype=int))
    full = (*batch, q_heads, q_len, kv_len)
    scale = qk_dim**-0.5 if softmax_scale is None else float(softmax_scale)

    def whole(x: ArrayLike) -> Array:
        spread = np.broadcast_to(_over_heads(np.asarray(x), q_heads), full)
        return spread.reshape((num_batch, *full[-3:]))

    def heads_first(x: Array) -> Array:
        x = np.repeat(x.astype(np.float64), q_heads // x.shape[-2], axis=-2)
        return x.reshape(num_batch, *x.shape[-3:]).transpose(0, 2, 1, 3)

    allowed, sink_token = _visible(
        batch, q_len, kv_len, num_sink_tokens=num_sink_tokens, whole=whole, **visibility
    )
    if bias is not None:
        bias = whole(np.asarray(bias).astype(np.float64))
        allowed = allowed & ~np.isneginf(bias)

    # What nobody may see is taken away before any arithmetic: it may be NaN.
    seen, sees = allowed.any(2)[..., None], allowed.any(3)[..., None]
    query = np.where(sees, heads_first(query), 0.0)
    key = np.where(seen, heads_first(key), 0.0)
    value = np.where(seen, heads_first(value), 0.0)
    dots = np.where(allowed, np.einsum("bhtd,bhsd->bhts", query, key), 0.0)
    logits, slope = scale * dots, np.ones_like(dots)
    if logits_soft_cap is not None:
        bent = np.tanh(logits / logits_soft_cap)
        logits, slope = logits_soft_cap * bent, 1 - bent**2
    if bias is not None:
        logits = logits + np.where(allowed, bias, 0.0)
    if sink_bias is not None:
        learned = _per_head(sink_bias, q_heads)
        logits = logits + np.einsum("hn,bsn->bhs", learned, sink_token)[:, :, None]
    logits = np.where(allowed, logits, -np.inf)
    sinks = np.zeros((q_heads, 0))
    if softmax_aux is not None:
        sinks = _per_head(softmax_aux, q_heads)
    sinks = np.broadcast_to(
        sinks[None, :, None], (num_batch, q_heads, q_len, sinks.shape[-1])
    )
    columns = np.concatenate([logits, sinks], axis=-1)
    lse = _log_sum_exp(columns, -1)
    empty = np.isneginf(lse)
    weights = np.exp(columns - np.where(empty, 0.0, lse)[..., None])
    weights, sink_weights = weights[..., :kv_len], weights[..., kv_len:]

    dropout = np.ones_like(weights)
    if keep is not None:
        kept_scale = 0.0 if dropout_prob == 1 else 1 / (1 - dropout_prob)
        dropout = np.asarray(keep, np.float64).reshape(dropout.shape) * kept_scale
    output = np.einsum("bhts,bhsv->bhtv", weights * dropout, value)
    return _Parts(
        query,
        key,
        value,
        dots,
        slope,
        allowed,
        weights,
        sink_weights,
        dropout,
        sink_token,
        scale,
        output,
        lse,
    )


def _visible(
    batch: tuple[int, ...],
    q_len: int,
    kv_len: int,
    *,
    whole: Any,
    num_sink_tokens: int,
    mask: ArrayLike | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    alignment: str = "top_left",
    query_offset: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    sequence_start: ArrayLike | None = None,
    sequence_end: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Who may attend to whom, and the one-hot number of each key among the sinks."""
    num_batch = int(np.prod(batch, dtype=int))
    allowed = np.ones((num_batch, q_len, kv_len), bool)
    q_position, kv_position = np.arange(q_len), np.arange(kv_len)
    offset = np.full(q_len, kv_len - q_len if alignment == "bottom_right" else 0)
    if cum_seqlens_q is not None or cum_seqlens_k is not None:
        cum_q = np.asarray(cum_seqlens_k if cum_seqlens_q is None else cum_seqlens_q)
        cum_k = np.asarray(cum_seqlens_q if cum_seqlens_k is None else cum_seqlens_k)
        q_ids, q_position = _unpack(cum_q, q_len)
        kv_ids, kv_position = _unpack(cum_k, kv_len)
        allowed &= (q_ids[:, None] == kv_ids) & (q_ids >= 0)[:, None]
        if alignment == "bottom_right":
            longer = np.append(np.diff(cum_k) - np.diff(cum_q), 0)
            offset = longer[q_ids]
    position = np.broadcast_to(q_position + offset, (num_batch, q_len))
    if query_offset is not None:
        start = np.broadcast_to(np.asarray(query_offset), batch).reshape(-1, 1)
        position = q_position + start
    distance = kv_position[None, None, :] - position[:, :, None]
    first = np.zeros(1, int) if sequence_start is None else np.asarray(sequence_start)
    of_sequence = kv_position - first.reshape(-1, 1)
    is_sink = (of_sequence >= 0) & (of_sequence < num_sink_tokens)
    if causal:
        allowed &= distance <= 0
    if sliding_window is not None:
        pair = sliding_window
        left, right = pair if isinstance(pair, tuple) else (pair, pair)
        if left is not None:
            allowed &= (distance >= -left) | is_sink[:, None]
        if right is not None:
            allowed &= distance <= right
    if q_segment_ids is not None or kv_segment_ids is not None:
        q_ids = np.asarray(kv_segment_ids if q_segment_ids is None else q_segment_ids)
        kv_ids = np.asarray(q_segment_ids if kv_segment_ids is None else kv_segment_ids)
        q_ids = np.broadcast_to(q_ids, (*batch, q_len)).reshape(num_batch, q_len, 1)
        kv_ids = np.broadcast_to(kv_ids, (*batch, kv_len)).reshape(num_batch, 1, -1)
        allowed &= (q_ids == kv_ids) & (q_ids >= 0)
    index = np.arange(kv_len)
    if sequence_start is not None:
        allowed &= index >= np.asarray(sequence_start).reshape(-1, 1, 1)
    if sequence_end is not None:
        allowed &= index < np.asarray(sequence_end).reshape(-1, 1, 1)
    allowed = whole(allowed.reshape(*batch, 1, q_len, kv_len))
    if mask is not None:
        allowed = allowed & whole(np.asarray(mask) != 0)
    sink_token = of_sequence[:, :, None] == np.arange(num_sink_tokens)
    return allowed, np.broadcast_to(sink_token, (num_batch, *sink_token.shape[1:]))


def _unpack(cum_seqlens: Array, length: int) -> tuple[Array, Array]:
    """The number of each token's sequence (-1: none) and its place within it."""
    ids, place = np.full(length, -1), np.zeros(length, int)
    for i, (begin, end) in enumerate(itertools.pairwise(cum_seqlens)):
        ids[begin:end], place[begin:end] = i, np.arange(end - begin)
    return ids, place


def _over_heads(x: Array, q_heads: int) -> Array:
    """One entry for each query head where the head axis counts key/value heads."""
    if x.ndim >= 3 and x.shape[-3] not in (1, q_heads):
        x = np.repeat(x, q_heads // x.shape[-3], axis=-3)
    return x


def _per_head(x: ArrayLike, q_heads: int) -> Array:
    x = np.asarray(x).astype(np.float64)
    return np.broadcast_to(x, (q_heads, x.shape[-1]))


def _sum_to(x: Array, shape: tuple[int, ...], kv_heads: int) -> Array:
    """The transpose of broadcasting from `shape`, and from key/value heads."""
    if len(shape) >= 3 and shape[-3] == kv_heads not in (1, x.shape[-3]):
        grouped = x.reshape(*x.shape[:-3], kv_heads, -1, *x.shape[-2:])
        x = grouped.sum(-3)
    x = x.sum(tuple(range(x.ndim - len(shape))))
    narrow = tuple(i for i, n in enumerate(shape) if n == 1)
    return x.sum(narrow, keepdims=True)


def _log_sum_exp(x: Array, axis: int) -> Array:
    highest = x.max(axis, keepdims=True, initial=-np.inf)
    reference = np.where(np.isneginf(highest), 0.0, highest)
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(x - reference).sum(axis, keepdims=True))
    return (total + reference).squeeze(axis)

"""Standard attention: one block, the whole matrix of logits at once."""

from typing import Literal, Unpack, overload

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from .._config import Alignment, Precision
from .._normalizer import SOFTMAX, Entmax, Normalizer, check_entmax
from .._typing import (
    Bias,
    CumSeqlens,
    DropoutKey,
    Key,
    KeySegments,
    Lse,
    Mask,
    Number,
    Out,
    Query,
    QueryOffset,
    QuerySegments,
    Scale,
    SinkBias,
    SinkLogits,
    Value,
    Weights,
    Window,
    checked,
)
from ._block import attend_block, whole
from ._entmax_standard import entmax_standard
from ._inputs import Inputs
from ._online_softmax import finite, is_empty
from ._options import CommonOptions


@overload
def standard_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    **options: Unpack[CommonOptions],
) -> Out: ...
@overload
def standard_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[True],
    **options: Unpack[CommonOptions],
) -> tuple[Out, Lse]: ...
@overload
def standard_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    return_weights: Literal[True],
    return_lse: Literal[False] = False,
    **options: Unpack[CommonOptions],
) -> tuple[Out, Weights]: ...
@overload
def standard_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    return_weights: Literal[True],
    return_lse: Literal[True],
    **options: Unpack[CommonOptions],
) -> tuple[Out, Weights, Lse]: ...
@checked
def standard_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softmax_aux: SinkLogits | None = None,
    num_sink_tokens: int = 0,
    sink_bias: SinkBias | None = None,
    causal: bool = False,
    sliding_window: Window | None = None,
    alignment: Alignment = Alignment.TOP_LEFT,
    query_offset: QueryOffset | None = None,
    q_segment_ids: QuerySegments | None = None,
    kv_segment_ids: KeySegments | None = None,
    cum_seqlens_q: CumSeqlens | None = None,
    cum_seqlens_k: CumSeqlens | None = None,
    softmax_scale: Scale | None = None,
    logits_soft_cap: Number | None = None,
    dropout_prob: Number = 0.0,
    dropout_key: DropoutKey | None = None,
    logits_dtype: DTypeLike = jnp.float32,
    precision: Precision = None,
    normalizer: Normalizer = SOFTMAX,
    return_weights: bool = False,
    return_lse: bool = False,
) -> Out | tuple[Out, Lse] | tuple[Out, Weights] | tuple[Out, Weights, Lse]:
    r"""Attention by way of the whole matrix of weights.

    $$o_i = \sum_j p_{ij} v_j, \qquad p_{ij} = \frac{e^{x_{ij}}}{\sum_s e^{a_s} +
    \sum_j e^{x_{ij}}}$$

    with logits x and sink logits a. Time and memory grow with `q_len * kv_len`; it is
    the fastest choice for short lengths and the only one that returns weights
    (Vaswani et al. 2017, arXiv 1706.03762).

    **Arguments:**

    - `query`: `*batch q_len q_heads qk_dim`, any floating dtype.
    - `key`, `value`: `*batch kv_len kv_heads qk_dim` and `*batch kv_len kv_heads
        v_dim`. `q_heads` is a multiple of `kv_heads`; query head h reads key head
        `h // (q_heads // kv_heads)`.
    - `mask`: bool or int, broadcastable to `*batch q_heads q_len kv_len`, its head axis
        1, kv_heads or q_heads. A pair may attend where it is True (not 0). Or one of
        [`eqx_attention.masks`][], of which no array is made.
    - `bias`: floating, of the same shapes. Added to the logits after scale and soft
        cap. Minus infinity forbids a pair. Or one of [`eqx_attention.scores`][].
    - `softmax_aux`: sink logits, `num_sinks` or `q_heads num_sinks`: columns of the
        softmax that have no value (Xiao et al. 2023, arXiv 2309.17453). Neither scaled
        nor capped.
    - `num_sink_tokens`: the first n keys of each sequence stay within the window's left
        bound whatever the distance. Causality, mask and segments still hold for them.
    - `sink_bias`: `num_sink_tokens` or `q_heads num_sink_tokens`, added to the logits
        of those keys.
    - `causal`: a query sees no key after its own position.
    - `sliding_window`: `(left, right)`, each an int or None for unbounded, or one int
        for both: key j is seen from position p when `-left <= j - p <= right`. So the
        last w keys, the own one among them, are `(w - 1, 0)`.
    - `alignment`: the position of query i is i (`TOP_LEFT`, the default) or
        i + kv_len - q_len (`BOTTOM_RIGHT`); in packed sequences, of each sequence.
    - `query_offset`: int, or integers that broadcast to `*batch`, which may be traced:
        the position of query i is i + query_offset, whatever the alignment.
    - `q_segment_ids`, `kv_segment_ids`: integers, `*batch q_len` and `*batch kv_len`.
        Equal ids attend; a negative id is padding. One alone serves both sides if these
        are of one length.
    - `cum_seqlens_q`, `cum_seqlens_k`: packed sequences: integers, the offset of each
        sequence, from 0 on, and the end of the last. Tokens past it are padding.
        Positions count within each sequence. One alone serves as above.
    - `softmax_scale`: a float or a 0-d array, which may be traced. By default
        1 / sqrt(qk_dim).
    - `logits_soft_cap`: logits x become `cap * tanh(x / cap)` (Gemma Team 2024,
        arXiv 2408.00118).
    - `dropout_prob`, `dropout_key`: each normalised weight is dropped with this
        probability, and kept ones are divided by 1 - p. Which ones depends on the key
        and on (batch, head, query, key) alone.
    - `logits_dtype`: the dtype of logits and exponentials. float32, the default, never
        cuts down float64.
    - `precision`: of the products, as in `jax.lax.dot`.
    - `normalizer`: what makes weights of logits: [`eqx_attention.Softmax`][], the
        default, or [`eqx_attention.Entmax`][], which has neither `softmax_aux` nor lse.
    - `return_weights`: also return the weights that multiplied the values, dropout
        included.
    - `return_lse`: also return the log of the sum of exponentials, sinks included.

    **Returns:**

    The output, `*batch q_len q_heads v_dim`, of the query's dtype; after it, if asked
    for, weights `*batch q_heads q_len kv_len` and lse `*batch q_heads q_len`, both
    float32 or wider. A query with nothing to attend to has output 0, and lse -inf or
    that of the sinks.

    **Raises:**

    `TypeError` for a wrong type, dtype or shape; `ValueError` for head counts that do
    not divide, masks that do not broadcast, numbers out of range, a missing dropout
    key, and options that contradict each other.
    """
    inputs = Inputs(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        softmax_aux=softmax_aux,
        num_sink_tokens=num_sink_tokens,
        sink_bias=sink_bias,
        causal=causal,
        sliding_window=sliding_window,
        alignment=alignment,
        query_offset=query_offset,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        cum_seqlens_q=cum_seqlens_q,
        cum_seqlens_k=cum_seqlens_k,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        dropout_prob=dropout_prob,
        dropout_key=dropout_key,
        logits_dtype=logits_dtype,
        precision=precision,
    )
    if isinstance(normalizer, Entmax):
        check_entmax(softmax_aux=softmax_aux, return_lse=return_lse or None)
        found, weights = entmax_standard(inputs, normalizer)
        return (found, weights) if return_weights else found
    out, lse, weights = standard(inputs, with_weights=return_weights)
    if weights is not None:
        return (out, weights, lse) if return_lse else (out, weights)
    return (out, lse) if return_lse else out


@eqx.filter_jit
def standard(
    inputs: Inputs, *, with_weights: bool = False
) -> tuple[Array, Array, Array | None]:
    """Output, lse and, if asked for, weights."""
    problem = inputs.problem()
    tile = whole(problem)
    state, logits = attend_block(problem, tile)
    out, lse = inputs.results(state)
    if not with_weights:
        return out, lse, None
    # As they were in the product with the values: relative to the maximum first.
    highest, row_lse = finite(state.max_logits), lse.reshape(logits.shape[:-1])
    share = jnp.where(is_empty(state), jnp.zeros_like(row_lse), highest - row_lse)
    weights = jnp.exp(logits - highest[..., None].astype(logits.dtype))
    weights = weights.astype(lse.dtype) * jnp.exp(share)[..., None]
    if problem.dropout is not None:
        weights = problem.dropout.apply(weights, tile)
    shape = (*lse.shape, logits.shape[-1])
    return out, lse, weights.reshape(shape)

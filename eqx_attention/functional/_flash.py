"""Flash attention: exact, in memory that grows with the length and not its square."""

from typing import Literal, Unpack, overload

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from .._config import Alignment, ChunkSizes, Differentiation, Precision
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
    Window,
    checked,
)
from ._entmax_flash import entmax_flash
from ._flash_core import Attend, attend_reverse, flash_state
from ._flash_primitive import attend_both
from ._inputs import Inputs
from ._options import CommonOptions
from ._partial import PartialAttention


@overload
def flash_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    chunk_sizes: ChunkSizes | None = None,
    differentiation: Differentiation = Differentiation.REVERSE,
    normalize_output: Literal[True] = True,
    return_lse: Literal[False] = False,
    **options: Unpack[CommonOptions],
) -> Out: ...
@overload
def flash_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    chunk_sizes: ChunkSizes | None = None,
    differentiation: Differentiation = Differentiation.REVERSE,
    normalize_output: Literal[True] = True,
    return_lse: Literal[True],
    **options: Unpack[CommonOptions],
) -> tuple[Out, Lse]: ...
@overload
def flash_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    chunk_sizes: ChunkSizes | None = None,
    differentiation: Differentiation = Differentiation.REVERSE,
    normalize_output: Literal[False],
    return_lse: Literal[False] = False,
    **options: Unpack[CommonOptions],
) -> PartialAttention: ...
@checked
def flash_attention(
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
    chunk_sizes: ChunkSizes | None = None,
    differentiation: Differentiation = Differentiation.REVERSE,
    normalize_output: bool = True,
    return_lse: bool = False,
) -> Out | tuple[Out, Lse] | PartialAttention:
    r"""Attention by chunks of queries and keys, with a running softmax.

    The same result as [`eqx_attention.standard_attention`][], forward and backward, in
    memory that grows with `q_len + kv_len`. Chunks of which causality, window, segments
    or mask forbid all pairs are skipped (Dao et al. 2022, arXiv 2205.14135; Dao 2023,
    arXiv 2307.08691; Rabe & Staats 2021, arXiv 2112.05682).

    Reverse mode is its own backward pass, which makes the logits again. It can be
    differentiated again, in either mode. `jax.jvp` of the function itself, and all that
    is made of it, needs `differentiation=Differentiation.BOTH`.

    **Arguments:**

    As in [`eqx_attention.standard_attention`][], and

    - `chunk_sizes`: how many queries and keys to take at a time. By default
        [`eqx_attention.default_chunk_sizes`][].
    - `differentiation`: [`eqx_attention.Differentiation`][]: with `REVERSE`, the
        default, JAX refuses forward mode; with `BOTH` all modes and mixtures work.
        Results and gradients are the same. With `Entmax` both work anyhow.
    - `normalize_output`: if False, return a [`eqx_attention.PartialAttention`][], to be
        merged with those over other keys. Give `softmax_aux` to one of them only.
    - `return_lse`: also return the log of the sum of exponentials, sinks included.

    **Returns:**

    The output, `*batch q_len q_heads v_dim`, of the query's dtype; with `return_lse`
    also lse `*batch q_heads q_len`, float32 or wider.

    **Raises:**

    As [`eqx_attention.standard_attention`][]; and `ValueError` for `return_lse`
    together with `normalize_output=False`, as a partial result has its own.
    """
    if return_lse and not normalize_output:
        raise ValueError(
            "return_lse is True and normalize_output False, but a PartialAttention "
            "has its lse within: call its finish()"
        )
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
    chunk_sizes = chunk_sizes or inputs.default_chunk_sizes()
    if isinstance(normalizer, Entmax):
        check_entmax(
            softmax_aux=softmax_aux,
            return_lse=return_lse or None,
            normalize_output=None if normalize_output else False,
        )
        return entmax_flash(inputs, normalizer, chunk_sizes)
    if not normalize_output:
        return flash_partial(inputs, chunk_sizes, differentiation)
    out, lse = flash(inputs, chunk_sizes, differentiation)
    return (out, lse) if return_lse else out


_ATTEND: dict[Differentiation, Attend] = {
    Differentiation.REVERSE: attend_reverse,
    Differentiation.BOTH: attend_both,
}


@eqx.filter_jit
def flash(
    inputs: Inputs, chunk_sizes: ChunkSizes, differentiation: Differentiation
) -> tuple[Array, Array]:
    """Output and lse."""
    attend = _ATTEND[differentiation]
    return inputs.results(flash_state(inputs.problem(), chunk_sizes, attend))


@eqx.filter_jit
def flash_partial(
    inputs: Inputs, chunk_sizes: ChunkSizes, differentiation: Differentiation
) -> PartialAttention:
    """The unnormalised pieces."""
    state = flash_state(inputs.problem(), chunk_sizes, _ATTEND[differentiation])
    return PartialAttention.from_state(inputs.with_sinks(state), inputs.batch_shape)

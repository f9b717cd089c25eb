"""`attention` dispatches to a backend; `Attention` holds the options of one."""

import dataclasses
from typing import Any, Literal, Unpack, assert_never, overload

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Integer

from ._backend import KERNELS, Backend, Resolution, resolve
from ._config import (
    Alignment,
    AttentionConfig,
    ChunkSizes,
    Differentiation,
    Precision,
    check_is_a,
)
from ._normalizer import SOFTMAX, Entmax, Normalizer, Softmax, check_entmax
from ._request import Request
from ._typing import (
    Bias,
    CumSeqlens,
    DropoutKey,
    Key,
    KeySegments,
    Mask,
    Number,
    QueryOffset,
    QuerySegments,
    Scale,
    SinkBias,
    SinkLogits,
    Value,
    Window,
    checked,
)
from .functional._entmax_flash import entmax_flash
from .functional._entmax_standard import entmax_standard
from .functional._flash import flash
from .functional._inputs import Inputs
from .functional._options import CommonOptions, InputOptions
from .functional._ragged_decode import ragged_decode_attention
from .functional._standard import standard


@overload
def attention(
    query: Float[Array, "... q_heads qk_dim"],
    key: Key,
    value: Value,
    *,
    backend: Backend = Backend.AUTO,
    chunk_sizes: ChunkSizes | None = None,
    differentiation: Differentiation = Differentiation.REVERSE,
    sequence_start: Integer[Array, "*batch"] | None = None,
    sequence_end: Integer[Array, "*batch"] | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[CommonOptions],
) -> Float[Array, "... q_heads v_dim"]: ...
@overload
def attention(
    query: Float[Array, "... q_heads qk_dim"],
    key: Key,
    value: Value,
    *,
    backend: Backend = Backend.AUTO,
    chunk_sizes: ChunkSizes | None = None,
    differentiation: Differentiation = Differentiation.REVERSE,
    sequence_start: Integer[Array, "*batch"] | None = None,
    sequence_end: Integer[Array, "*batch"] | None = None,
    return_lse: Literal[True],
    **options: Unpack[CommonOptions],
) -> tuple[Float[Array, "... q_heads v_dim"], Float[Array, "..."]]: ...
@checked
def attention(
    query: Float[Array, "... q_heads qk_dim"],
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
    backend: Backend = Backend.AUTO,
    chunk_sizes: ChunkSizes | None = None,
    differentiation: Differentiation = Differentiation.REVERSE,
    sequence_start: Integer[Array, "*batch"] | None = None,
    sequence_end: Integer[Array, "*batch"] | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "... q_heads v_dim"]
    | tuple[Float[Array, "... q_heads v_dim"], Float[Array, "..."]]
):
    """Attention by the backend that suits the arguments.

    **Arguments:**

    As in [`eqx_attention.standard_attention`][], and

    - `backend`: by default AUTO, which decodes if `sequence_end` is given, takes
        standard attention for small problems and flash attention for the rest.
        [`eqx_attention.resolve`][] says which, and why.
    - `chunk_sizes`: as in [`eqx_attention.flash_attention`][]. In decoding, `key` is
        the block size.
    - `differentiation`: as in [`eqx_attention.flash_attention`][]. The other backends
        are open to both modes whatever it says.
    - `sequence_start`, `sequence_end`: as in
        [`eqx_attention.ragged_decode_attention`][], whose query may also be a single
        token; start is 0 by default.
    - `return_lse`: also return the log of the sum of exponentials, sinks included.

    **Returns:** the output, and lse if asked for, as the backend's own function does.

    **Raises:**

    As the backend's own function; and `ValueError` for a backend that can't do what is
    asked, such as dropout or segments in decoding.
    """
    options = InputOptions(
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
    choice = resolve(
        query,
        key,
        value,
        backend=backend,
        sequence_end=sequence_end,
        chunk_sizes=chunk_sizes,
        differentiation=differentiation,
        return_lse=return_lse,
        normalizer=normalizer,
        **options,
    )
    if sequence_end is not None:
        _refuse_in_decode(
            query_offset=query_offset,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            cum_seqlens_q=cum_seqlens_q,
            cum_seqlens_k=cum_seqlens_k,
            dropout_prob=dropout_prob if dropout_prob > 0 else None,
            normalizer=None if isinstance(normalizer, Softmax) else normalizer,
        )
        out, lse = ragged_decode_attention(
            query,
            key,
            value,
            jnp.zeros_like(sequence_end) if sequence_start is None else sequence_start,
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
            block_size=None if chunk_sizes is None else chunk_sizes.key,
            return_lse=True,
        )
        return (out, lse) if return_lse else out
    if sequence_start is not None:
        raise ValueError(
            "sequence_start is given, but sequence_end is None: decoding needs both"
        )
    inputs = Inputs(query, key, value, **options)
    if isinstance(normalizer, Entmax):
        check_entmax(softmax_aux=softmax_aux, return_lse=return_lse or None)
        if choice.chunk_sizes is None:
            return entmax_standard(inputs, normalizer)[0]
        return entmax_flash(inputs, normalizer, choice.chunk_sizes)
    match choice.backend:
        case Backend.STANDARD:
            out, lse, _ = standard(inputs)
        case Backend.FLASH:
            assert choice.chunk_sizes is not None
            out, lse = flash(inputs, choice.chunk_sizes, differentiation)
        case Backend.AUTO | Backend.RAGGED_DECODE:
            raise AssertionError("resolve() leaves neither without sequence_end")
        case Backend.CUDNN | Backend.SPLASH | Backend.TOKAMAX | Backend.FA4:
            request = Request.of(
                query, key, value, chunk_sizes=choice.chunk_sizes, **options
            )
            return KERNELS[choice.backend](
                request, query, key, value, softmax_aux, inputs.q_segment_ids
            )
        case _:
            assert_never(choice.backend)
    return (out, lse) if return_lse else out


def _refuse_in_decode(**given: object) -> None:
    """Options that mean nothing in decoding are errors, not ignored."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is given together with sequence_end, but decoding can't do it"
            )


class Attention(eqx.Module):
    """Attention whose options are chosen once.

    A frozen module without parameters: put it into a model as a field and call it.

    **Fields:**

    - `config`: an [`eqx_attention.AttentionConfig`][].
    - `backend`: an [`eqx_attention.Backend`][], by default AUTO.
    - `chunk_sizes`: for flash attention; None for the default rule.
    - `inference`: if True, there is no dropout; `equinox.nn.inference_mode` sets it.
    """

    config: AttentionConfig = eqx.field(static=True, default=AttentionConfig())
    backend: Backend = eqx.field(static=True, default=Backend.AUTO)
    chunk_sizes: ChunkSizes | None = eqx.field(static=True, default=None)
    inference: bool = False

    def __check_init__(self) -> None:
        check_is_a("config", self.config, AttentionConfig)
        check_is_a("backend", self.backend, Backend)
        if self.chunk_sizes is not None:
            check_is_a("chunk_sizes", self.chunk_sizes, ChunkSizes)

    @checked
    def __call__(
        self,
        query: Float[Array, "... q_heads qk_dim"],
        key: Key,
        value: Value,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        softmax_aux: SinkLogits | None = None,
        sink_bias: SinkBias | None = None,
        q_segment_ids: QuerySegments | None = None,
        kv_segment_ids: KeySegments | None = None,
        cum_seqlens_q: CumSeqlens | None = None,
        cum_seqlens_k: CumSeqlens | None = None,
        sequence_start: Integer[Array, "*batch"] | None = None,
        sequence_end: Integer[Array, "*batch"] | None = None,
        dropout_key: DropoutKey | None = None,
        normalizer: Normalizer | None = None,
        inference: bool | None = None,
    ) -> Float[Array, "... q_heads v_dim"]:
        """The output, `*batch q_len q_heads v_dim`, of the query's dtype.

        **Arguments:** as in [`eqx_attention.attention`][]; `inference` overrides the
        field of that name, and `normalizer` that of the config, so that its alpha can
        be trained.
        """
        config = self.config
        inference = self.inference if inference is None else inference
        return attention(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            softmax_aux=softmax_aux,
            num_sink_tokens=config.num_sink_tokens,
            sink_bias=sink_bias,
            causal=config.causal,
            sliding_window=config.sliding_window,
            alignment=config.alignment,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            cum_seqlens_q=cum_seqlens_q,
            cum_seqlens_k=cum_seqlens_k,
            softmax_scale=config.softmax_scale,
            logits_soft_cap=config.logits_soft_cap,
            dropout_prob=0.0 if inference else config.dropout_prob,
            dropout_key=dropout_key,
            logits_dtype=config.logits_dtype,
            precision=config.precision,
            normalizer=config.normalizer if normalizer is None else normalizer,
            backend=self.backend,
            chunk_sizes=self.chunk_sizes,
            differentiation=config.differentiation,
            sequence_start=sequence_start,
            sequence_end=sequence_end,
        )

    @checked
    def resolve(
        self,
        query: Float[Array, "... q_heads qk_dim"],
        key: Key,
        value: Value,
        *,
        sequence_end: Integer[Array, "*batch"] | None = None,
        **options: Any,
    ) -> Resolution:
        """The backend that a call with these arguments uses, and the reason.

        **Arguments:** as of a call.
        """
        return resolve(
            query,
            key,
            value,
            backend=self.backend,
            sequence_end=sequence_end,
            chunk_sizes=self.chunk_sizes,
            **call_options(self, **options),
        )


def call_options(
    attention: Attention,
    *,
    inference: bool | None = None,
    normalizer: Normalizer | None = None,
    sequence_start: object = None,
    **options: Any,
) -> dict[str, Any]:
    """The options of `attention` and of a call of it, as the function takes them."""
    del sequence_start
    config = attention.config
    named = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    if attention.inference if inference is None else inference:
        named["dropout_prob"] = 0.0
    if normalizer is not None:
        named["normalizer"] = normalizer
    return {**named, **options}

"""Multihead attention: projections, and attention between them."""

import warnings
from collections.abc import Callable
from typing import TypeAlias, TypedDict, Unpack, final, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Integer, PRNGKeyArray

from ._attention import attention
from ._backend import Backend
from ._cache import KVCache
from ._cache_base import check_sizes
from ._config import (
    AttentionConfig,
    ChunkSizes,
    Precision,
    check_is_a,
    window_bounds,
)
from ._layers import (
    Cache,
    Norm,
    NumTokens,
    append_and_attend,
    check_dropout_p,
    check_dtype,
    check_width,
    count_from,
    dropout_prob_of,
    each,
    join_heads,
    lengths_of,
    project,
    refuse_together,
    split_heads,
)
from ._paged_cache import PagedKVCache
from ._rolling_cache import RollingKVCache
from ._rotary import RotaryEmbedding
from ._typing import (
    Bias,
    CumSeqlens,
    KeySegments,
    Mask,
    Number,
    QueryOffset,
    QuerySegments,
    SinkBias,
    Window,
    checked,
)
from .functional._options import ScoreOptions

ProcessHeads: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Array, Array]]
QueryPositions: TypeAlias = Integer[Array, "*#batch q_seq"]
KeyPositions: TypeAlias = Integer[Array, "*#batch kv_seq"]
# A mask that is no part of what is traced is often made by NumPy.
AnyMask: TypeAlias = Mask | Bool[np.ndarray, "..."]


@final
class ProjectedKV(eqx.Module):
    """Keys and values by head: what [`eqx_attention.MultiheadAttention`][] makes once.

    **Fields:**

    - `key`: `*batch kv_seq num_kv_heads qk_size`, after norm and rotary embedding.
    - `value`: `*batch kv_seq num_kv_heads vo_size`.
    """

    key: Float[Array, "*batch kv_seq num_kv_heads qk_size"]
    value: Float[Array, "*batch kv_seq num_kv_heads vo_size"]


class ExtraOptions(TypedDict, total=False):
    """What the constructor takes beyond Equinox, but for what is drawn at random."""

    causal: bool
    sliding_window: Window | None
    logits_soft_cap: Number | None
    softmax_scale: Number | None
    num_sinks: int
    num_sink_tokens: int
    rotary: RotaryEmbedding | None
    qk_norm: Callable[[int], Norm] | None
    compute_dtype: DTypeLike | None
    precision: Precision
    backend: Backend
    chunk_sizes: ChunkSizes | None


class CallOptions(TypedDict, total=False):
    """The keyword arguments of a call, for its overloads."""

    key: PRNGKeyArray | None
    inference: bool | None
    deterministic: bool | None
    process_heads: ProcessHeads | None
    bias: Bias | None
    sink_bias: SinkBias | None
    q_segment_ids: QuerySegments | None
    kv_segment_ids: KeySegments | None
    cum_seqlens_q: CumSeqlens | None
    cum_seqlens_k: CumSeqlens | None
    query_offset: QueryOffset | None
    q_positions: QueryPositions | None
    kv_positions: KeyPositions | None


@final
class MultiheadAttention(eqx.Module):
    r"""Takes the place of `equinox.nn.MultiheadAttention`, and does more.

    The constructor's names, their order and defaults, the weights that a key gives, and
    the results are those of Equinox. What follows `dtype` is new. All that is off by
    default leaves the weights as they are.

    Heads may share keys and values (`num_kv_heads`; Ainslie et al. 2023, arXiv
    2305.13245). `sinks`, if any, are learned logits that take a part of the softmax and
    have no value. With `qk_norm` each head's query and key are normalised (Henry et al.
    2020, arXiv 2010.04245), before `rotary` turns them. With `output_gate` the heads'
    output is multiplied with $\sigma(W x)$, where x is the query (Qiu et al. 2025,
    arXiv 2505.06708).

    The softmax is computed in float32 or wider, whatever the dtype. Other than in
    Equinox, a query that sees no key has heads of output 0, where Equinox has the mean
    of all values; and dropout keeps other weights for the same key.

    **Fields:**

    - `query_proj`, `key_proj`, `value_proj`, `output_proj`: each an
        `equinox.nn.Linear`.
    - `dropout`: an `equinox.nn.Dropout`; `equinox.nn.inference_mode` turns it off.
    - `gate_proj`: an `equinox.nn.Linear`, or None.
    - `query_norm`, `key_norm`: what `qk_norm` made, or None.
    - `sinks`: `num_heads num_sinks`, or None.
    - `config`: the [`eqx_attention.AttentionConfig`][] of what does not change.
    - The rest is as given.
    """

    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    gate_proj: eqx.nn.Linear | None
    query_norm: Norm | None
    key_norm: Norm | None
    sinks: Float[Array, "num_heads num_sinks"] | None
    rotary: RotaryEmbedding | None

    num_heads: int = eqx.field(static=True)
    query_size: int = eqx.field(static=True)
    key_size: int = eqx.field(static=True)
    value_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    qk_size: int = eqx.field(static=True)
    vo_size: int = eqx.field(static=True)
    use_query_bias: bool = eqx.field(static=True)
    use_key_bias: bool = eqx.field(static=True)
    use_value_bias: bool = eqx.field(static=True)
    use_output_bias: bool = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    config: AttentionConfig = eqx.field(static=True)
    compute_dtype: DTypeLike | None = eqx.field(static=True)
    backend: Backend = eqx.field(static=True)
    chunk_sizes: ChunkSizes | None = eqx.field(static=True)

    @checked
    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: Number = 0.0,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        sliding_window: Window | None = None,
        logits_soft_cap: Number | None = None,
        softmax_scale: Number | None = None,
        num_sinks: int = 0,
        num_sink_tokens: int = 0,
        rotary: RotaryEmbedding | None = None,
        qk_norm: Callable[[int], Norm] | None = None,
        output_gate: bool = False,
        compute_dtype: DTypeLike | None = None,
        precision: Precision = None,
        backend: Backend = Backend.AUTO,
        chunk_sizes: ChunkSizes | None = None,
        key: PRNGKeyArray,
    ) -> None:
        """A layer with weights drawn at random.

        **Arguments:**

        - `num_heads`: how many heads.
        - `query_size`: the width of a query.
        - `key_size`, `value_size`, `output_size`: the widths of a key, a value and the
            output; each is `query_size` by default.
        - `qk_size`, `vo_size`: the widths of a head's keys and values; each is
            `query_size / num_heads` by default.
        - `use_query_bias`, `use_key_bias`, `use_value_bias`, `use_output_bias`: whether
            the projections add a bias; False by default.
        - `dropout_p`: the part of the weights that dropout drops; 0 by default.
        - `inference`: if True, there is no dropout; False by default.
        - `dtype`: of the parameters; by default float32, or float64 under x64.
        - `num_kv_heads`: how many heads of keys and values; `num_heads` by default.
            Query head h has those of head `h // (num_heads // num_kv_heads)`.
        - `causal`, `sliding_window`, `logits_soft_cap`, `softmax_scale`,
            `num_sink_tokens`, `precision`: as in
            [`eqx_attention.standard_attention`][].
        - `num_sinks`: how many sink logits each head learns; they begin at 0. By
            default none.
        - `rotary`: an [`eqx_attention.RotaryEmbedding`][] for queries and keys.
        - `qk_norm`: makes the norms of a head's query and key, given `qk_size`:
            `equinox.nn.RMSNorm`, `equinox.nn.LayerNorm`, or `lambda size:
            equinox.nn.RMSNorm(size, eps=1e-6, use_bias=False)`.
        - `output_gate`: whether the heads' output is gated; False by default.
        - `compute_dtype`: what inputs and parameters are made before they are
            multiplied; the output then has the query's dtype. By default nothing is
            cast.
        - `backend`, `chunk_sizes`: as in [`eqx_attention.Attention`][]. A cache attends
            by itself, `chunk_sizes.key` tokens at a time.
        - `key`: the PRNG key that the parameters are drawn with.

        **Raises:** `ValueError` or `TypeError` for sizes that do not divide, and for
        what no attention can do.
        """
        check_sizes(num_heads=num_heads, query_size=query_size)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads is {num_heads}, which is not a positive multiple of "
                f"num_kv_heads = {num_kv_heads}"
            )
        if query_size % num_heads and (qk_size is None or vo_size is None):
            raise ValueError(
                f"query_size is {query_size}, which is not a multiple of num_heads = "
                f"{num_heads}: give both qk_size and vo_size"
            )
        head_size = query_size // num_heads
        key_size = query_size if key_size is None else key_size
        value_size = query_size if value_size is None else value_size
        output_size = query_size if output_size is None else output_size
        qk_size = head_size if qk_size is None else qk_size
        vo_size = head_size if vo_size is None else vo_size
        check_sizes(
            key_size=key_size,
            value_size=value_size,
            output_size=output_size,
            qk_size=qk_size,
            vo_size=vo_size,
            num_sinks=num_sinks,
        )
        if qk_size == 0:
            raise ValueError("qk_size is 0, but must be at least 1")
        if rotary is not None and rotary.dim > qk_size:
            raise ValueError(
                f"rotary turns {rotary.dim} numbers of a head, but qk_size is {qk_size}"
            )
        if isinstance(qk_norm, eqx.Module):
            raise TypeError(
                "qk_norm is a layer, but must be what makes one of a given size, such "
                "as equinox.nn.RMSNorm"
            )
        check_dropout_p(dropout_p)
        check_is_a("backend", backend, Backend)
        if chunk_sizes is not None:
            check_is_a("chunk_sizes", chunk_sizes, ChunkSizes)
        self.config = AttentionConfig(
            causal=causal,
            sliding_window=sliding_window,
            softmax_scale=softmax_scale,
            logits_soft_cap=logits_soft_cap,
            num_sink_tokens=num_sink_tokens,
            precision=precision,
        )

        # As Equinox splits it, so that the same key gives the same weights.
        query_key, key_key, value_key, output_key = jax.random.split(key, 4)

        def linear(
            in_size: int, out_size: int, use_bias: bool, key: PRNGKeyArray
        ) -> eqx.nn.Linear:
            return eqx.nn.Linear(in_size, out_size, use_bias, dtype, key=key)

        q_width, v_width = num_heads * qk_size, num_heads * vo_size
        kv_part = num_heads // num_kv_heads
        self.query_proj = linear(query_size, q_width, use_query_bias, query_key)
        self.key_proj = linear(key_size, q_width // kv_part, use_key_bias, key_key)
        self.value_proj = linear(
            value_size, v_width // kv_part, use_value_bias, value_key
        )
        self.output_proj = linear(v_width, output_size, use_output_bias, output_key)
        self.dropout = eqx.nn.Dropout(dropout_p, inference)
        gate_key = jax.random.fold_in(key, 4)
        self.gate_proj = (
            linear(query_size, v_width, False, gate_key) if output_gate else None
        )
        self.query_norm = None if qk_norm is None else qk_norm(qk_size)
        self.key_norm = None if qk_norm is None else qk_norm(qk_size)
        self.sinks = None
        if num_sinks > 0:
            self.sinks = jnp.zeros((num_heads, num_sinks), self.query_proj.weight.dtype)
        self.rotary = rotary
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.query_size, self.key_size = query_size, key_size
        self.value_size, self.output_size = value_size, output_size
        self.qk_size, self.vo_size = qk_size, vo_size
        self.use_query_bias, self.use_key_bias = use_query_bias, use_key_bias
        self.use_value_bias, self.use_output_bias = use_value_bias, use_output_bias
        self.compute_dtype = check_dtype("compute_dtype", compute_dtype)
        self.backend, self.chunk_sizes = backend, chunk_sizes

    @overload
    def __call__(
        self,
        query: Array,
        key_: Array | ProjectedKV,
        value: Array | None = None,
        mask: AnyMask | None = None,
        *,
        cache: None = None,
        num_tokens: None = None,
        **options: Unpack[CallOptions],
    ) -> Array: ...
    @overload
    def __call__(
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: AnyMask | None = None,
        *,
        cache: Cache,
        num_tokens: NumTokens | None = None,
        **options: Unpack[CallOptions],
    ) -> tuple[Array, Cache]: ...
    @checked
    def __call__(
        self,
        query: Float[Array, "*batch q_seq query_size"],
        key_: Float[Array, "*batch kv_seq key_size"] | ProjectedKV,
        value: Float[Array, "*batch kv_seq value_size"] | None = None,
        mask: AnyMask | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: ProcessHeads | None = None,
        bias: Bias | None = None,
        sink_bias: SinkBias | None = None,
        q_segment_ids: QuerySegments | None = None,
        kv_segment_ids: KeySegments | None = None,
        cum_seqlens_q: CumSeqlens | None = None,
        cum_seqlens_k: CumSeqlens | None = None,
        query_offset: QueryOffset | None = None,
        q_positions: QueryPositions | None = None,
        kv_positions: KeyPositions | None = None,
        cache: Cache | None = None,
        num_tokens: NumTokens | None = None,
    ) -> (
        Float[Array, "*batch q_seq output_size"]
        | tuple[Float[Array, "*batch q_seq output_size"], Cache]
    ):
        """The output, and with a cache also the new cache.

        As in Equinox a call takes one sequence, and `jax.vmap` makes a batch of it.
        Arrays may also have batch axes of their own, before all others.

        **Arguments:**

        - `query`: `*batch q_seq query_size`.
        - `key_`: `*batch kv_seq key_size`; or what `project_kv` returned, with a
            `value` of None.
        - `value`: `*batch kv_seq value_size`.
        - `mask`: as in [`eqx_attention.standard_attention`][]: `q_seq kv_seq`,
            `num_heads q_seq kv_seq`, or all that broadcasts to `*batch num_heads q_seq
            kv_seq`. True means that the query may see the key.
        - `key`: a PRNG key, needed if there is dropout.
        - `inference`: overrides `dropout.inference`.
        - `deterministic`: a former name of `inference`, with a warning.
        - `process_heads`: a function from the heads of query, key and value, `*batch
            length heads size`, to others of the same shapes. It comes after the norms
            and before the rotary embedding. Not with a cache, whose tokens it would not
            know the positions of, nor with projected keys and values.
        - `bias`, `sink_bias`, `q_segment_ids`, `kv_segment_ids`, `cum_seqlens_q`,
            `cum_seqlens_k`, `query_offset`: as in
            [`eqx_attention.standard_attention`][].
        - `q_positions`, `kv_positions`: integers, `*batch q_seq` and `*batch kv_seq`:
            where tokens stand for the rotary embedding. By default keys stand at 0, 1
            and so on, queries as well, after the cache's tokens or `query_offset`. One
            given alone serves both, if `q_seq == kv_seq`. They have no part in masks.
            Packed sequences need none, as only distances within each matter.
        - `cache`: an [`eqx_attention.KVCache`][], [`eqx_attention.RollingKVCache`][] or
            [`eqx_attention.PagedKVCache`][]. The tokens are appended, and each sees the
            cache up to itself; so query, key and value are of the same tokens, and
            `causal` must be True. `mask` and `bias` then speak of the cache's capacity
            in place of `kv_seq`. The cache has one batch axis, as has the query. A
            query without one takes a cache of one sequence; and under `jax.vmap` over
            the query and a cache of a batch, each call takes a sequence of it (not of a
            `PagedKVCache`, whose pages belong to all).
        - `num_tokens`: with a cache, how many of the tokens, from the first on, are
            real, for each sequence. The rest is padding. By default all are.

        **Returns:**

        The output, `*batch q_seq output_size`; with a cache, `(output, cache)`.

        **Raises:**

        As [`eqx_attention.attention`][]; and `ValueError` for what does not go
        together.
        """
        if deterministic is not None:
            warnings.warn("deterministic is now called inference", stacklevel=2)
            inference = deterministic
        dropout_prob = dropout_prob_of(self.dropout, key, inference)
        options = ScoreOptions(
            mask=jnp.asarray(mask) if isinstance(mask, np.ndarray) else mask,
            bias=bias,
            softmax_aux=self.sinks,
            sink_bias=sink_bias,
            softmax_scale=self.config.softmax_scale,
            logits_soft_cap=self.config.logits_soft_cap,
            precision=self.config.precision,
        )
        options = options | self._window(cache)
        if cache is None:
            if num_tokens is not None:
                raise ValueError("num_tokens is given, but cache is None")
            positions = self._positions(
                query, key_, q_positions, kv_positions, query_offset
            )
            query_heads, projected = self._heads(
                query, key_, value, process_heads, positions
            )
            out = attention(
                query_heads,
                projected.key,
                projected.value,
                causal=self.config.causal,
                q_segment_ids=q_segment_ids,
                kv_segment_ids=kv_segment_ids,
                cum_seqlens_q=cum_seqlens_q,
                cum_seqlens_k=cum_seqlens_k,
                query_offset=query_offset,
                dropout_prob=dropout_prob,
                dropout_key=key,
                backend=self.backend,
                chunk_sizes=self.chunk_sizes,
                **options,
            )
            return self._output(query, out)
        refuse_together(
            "cache",
            process_heads=process_heads,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            cum_seqlens_q=cum_seqlens_q,
            cum_seqlens_k=cum_seqlens_k,
            query_offset=query_offset,
            dropout=dropout_prob or None,
        )
        self._check_cached(query, key_)
        lengths = lengths_of(cache, query.shape[:-2])
        positions = self._positions(
            query, key_, q_positions, kv_positions, lengths, lengths
        )
        query_heads, projected = self._heads(query, key_, value, None, positions)
        out, cache = append_and_attend(
            cache,
            query_heads,
            projected.key,
            projected.value,
            num_tokens,
            block_size=None if self.chunk_sizes is None else self.chunk_sizes.key,
            **options,
        )
        return self._output(query, out), cache

    @checked
    def project_kv(
        self,
        key_: Float[Array, "*batch kv_seq key_size"],
        value: Float[Array, "*batch kv_seq value_size"],
        *,
        kv_positions: KeyPositions | None = None,
    ) -> ProjectedKV:
        """Keys and values by head, to be used in any number of calls.

        So the tokens of an encoder are projected once for all steps of a decoder:
        `projected = cross.project_kv(x, x)`, and then `cross(query, projected)`.

        **Arguments:** as in a call.

        **Returns:** an [`eqx_attention.ProjectedKV`][], which a call takes as its
        `key_`.
        """
        if self.rotary is None and kv_positions is not None:
            raise ValueError("kv_positions need a rotary embedding")
        key, value = self._kv_heads(key_, value)
        return ProjectedKV(self._turned(key, kv_positions), value)

    def init_cache(
        self, batch_size: int, capacity: int, *, dtype: DTypeLike = jnp.float32
    ) -> KVCache:
        """A cache without tokens for this layer's keys and values.

        **Arguments:** as in [`eqx_attention.KVCache`][].
        """
        return KVCache.init(
            *(batch_size, capacity, self.num_kv_heads, self.qk_size, self.vo_size),
            dtype=dtype,
        )

    @staticmethod
    def from_equinox(
        mha: eqx.nn.MultiheadAttention, **options: Unpack[ExtraOptions]
    ) -> "MultiheadAttention":
        """The same layer with the weights of Equinox's.

        **Arguments:**

        - `mha`: an `equinox.nn.MultiheadAttention`.
        - `options`: what the constructor takes after `dtype`, without `num_kv_heads`,
            `output_gate` and `key`.

        **Returns:** the layer. Without options it computes what `mha` computes.
        """
        made = MultiheadAttention(
            *_sizes(mha),
            dtype=mha.query_proj.weight.dtype,
            key=jax.random.key(0),
            **options,
        )
        return eqx.tree_at(_equinox_part, made, _equinox_part(mha))

    def to_equinox(self) -> eqx.nn.MultiheadAttention:
        """Equinox's layer with the weights of this one.

        `backend`, `chunk_sizes` and `precision`, which change nothing but rounding, are
        left behind.

        **Returns:** an `equinox.nn.MultiheadAttention` that computes the same; but see
        the class for queries that see no key, and for dropout.

        **Raises:** `ValueError` for a layer that does what Equinox's doesn't.
        """
        config = self.config
        extra = {
            "num_kv_heads": self.num_kv_heads != self.num_heads,
            "causal": config.causal,
            "sliding_window": config.sliding_window is not None,
            "logits_soft_cap": config.logits_soft_cap is not None,
            "softmax_scale": config.softmax_scale is not None,
            "num_sinks": self.sinks is not None,
            "num_sink_tokens": config.num_sink_tokens > 0,
            "rotary": self.rotary is not None,
            "qk_norm": self.query_norm is not None or self.key_norm is not None,
            "output_gate": self.gate_proj is not None,
            "compute_dtype": self.compute_dtype is not None,
        }
        used = [name for name, is_used in extra.items() if is_used]
        if used:
            raise ValueError(
                f"this layer has {', '.join(used)}, which "
                "equinox.nn.MultiheadAttention has not"
            )
        made = eqx.nn.MultiheadAttention(*_sizes(self), key=jax.random.key(0))
        return eqx.tree_at(_equinox_part, made, _equinox_part(self))

    def _heads(
        self,
        query: Array,
        key_: Array | ProjectedKV,
        value: Array | None,
        process_heads: ProcessHeads | None,
        positions: tuple[Array | None, Array | None],
    ) -> tuple[Array, ProjectedKV]:
        """Heads of the query, and of keys and values, as attention takes them."""
        q_positions, kv_positions = positions
        check_width("query", query, self.query_size)
        query = split_heads(
            project(self.query_proj, query, self.compute_dtype), self.num_heads
        )
        if self.query_norm is not None:
            query = each(self.query_norm, query)
        if isinstance(key_, ProjectedKV):
            refuse_together(
                "a ProjectedKV as key_",
                value=value,
                process_heads=process_heads,
            )
            return self._turned(query, q_positions), key_
        if value is None:
            raise ValueError("value is None, but only a ProjectedKV goes without")
        key, value = self._kv_heads(key_, value)
        if process_heads is not None:
            heads = query, key, value
            query, key, value = process_heads(*heads)
            shapes = [tuple(x.shape for x in xs) for xs in (heads, (query, key, value))]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"process_heads returned heads of shapes {shapes[1]}, but must "
                    f"keep those it was given: {shapes[0]}"
                )
        query = self._turned(query, q_positions)
        return query, ProjectedKV(self._turned(key, kv_positions), value)

    def _kv_heads(self, key: Array, value: Array) -> tuple[Array, Array]:
        check_width("key_", key, self.key_size)
        check_width("value", value, self.value_size)
        key = split_heads(
            project(self.key_proj, key, self.compute_dtype), self.num_kv_heads
        )
        value = split_heads(
            project(self.value_proj, value, self.compute_dtype), self.num_kv_heads
        )
        return (key if self.key_norm is None else each(self.key_norm, key)), value

    def _turned(self, heads: Array, positions: Array | None) -> Array:
        return heads if self.rotary is None else self.rotary(heads, positions)

    def _output(self, query: Array, out: Array) -> Array:
        heads = join_heads(out)
        if self.gate_proj is not None:
            gate = project(self.gate_proj, query, self.compute_dtype)
            heads = heads * jax.nn.sigmoid(gate)
        out = project(self.output_proj, heads, self.compute_dtype)
        return out if self.compute_dtype is None else out.astype(query.dtype)

    def _positions(
        self,
        query: Array,
        key_: Array | ProjectedKV,
        q_positions: Array | None,
        kv_positions: Array | None,
        q_start: int | Array | None,
        kv_start: int | Array = 0,
    ) -> tuple[Array | None, Array | None]:
        """Where queries and keys stand for the rotary embedding."""
        given = [x for x in (q_positions, kv_positions) if x is not None]
        if self.rotary is None:
            if given:
                raise ValueError("q_positions or kv_positions need a rotary embedding")
            return None, None
        q_len, q_start = query.shape[-2], 0 if q_start is None else q_start
        if isinstance(key_, ProjectedKV):
            refuse_together("a ProjectedKV as key_", kv_positions=kv_positions)
            return given[0] if given else count_from(q_start, q_len), None
        kv_len = key_.shape[-2]
        if not given:
            return count_from(q_start, q_len), count_from(kv_start, kv_len)
        if len(given) == 1 and q_len != kv_len:
            raise ValueError(
                "q_positions or kv_positions alone serve both only if query and key_ "
                f"are of one length, and they are {q_len} and {kv_len}"
            )
        return given[0], given[-1]

    def _check_cached(self, query: Array, key_: Array | ProjectedKV) -> None:
        """A cache is for causal self-attention."""
        if isinstance(key_, ProjectedKV):
            raise ValueError(
                "cache is given, but key_ is a ProjectedKV, which needs no cache"
            )
        if key_.shape[-2] != query.shape[-2]:
            raise ValueError(
                f"query has {query.shape[-2]} tokens and key_ {key_.shape[-2]}, but "
                "with a cache both are the same new tokens"
            )
        if not self.config.causal:
            raise ValueError(
                "cache is given, but causal is False: a token sees the cache up to "
                "itself, so the layer needs causal=True"
            )

    def _window(
        self, cache: KVCache | RollingKVCache | PagedKVCache | None
    ) -> ScoreOptions:
        """The window and the sink tokens, if not those of the cache."""
        window, sinks = self.config.sliding_window, self.config.num_sink_tokens
        if not isinstance(cache, RollingKVCache):
            return ScoreOptions(sliding_window=window, num_sink_tokens=sinks)
        if (window_bounds(window)[0], sinks) != (cache.left, cache.num_sink_tokens):
            raise ValueError(
                f"cache keeps a window of {cache.left} and {cache.num_sink_tokens} "
                f"sink tokens, but this layer has sliding_window = {window} and "
                f"num_sink_tokens = {sinks}"
            )
        return ScoreOptions()


def _sizes(
    layer: MultiheadAttention | eqx.nn.MultiheadAttention,
) -> tuple[int, int, int, int, int, int, int, bool, bool, bool, bool]:
    """The first arguments of both constructors."""
    return (
        layer.num_heads,
        layer.query_size,
        layer.key_size,
        layer.value_size,
        layer.output_size,
        layer.qk_size,
        layer.vo_size,
        layer.use_query_bias,
        layer.use_key_bias,
        layer.use_value_bias,
        layer.use_output_bias,
    )


def _equinox_part(
    layer: MultiheadAttention | eqx.nn.MultiheadAttention,
) -> tuple[eqx.Module, ...]:
    """What both have, and all that Equinox's has."""
    return (
        layer.query_proj,
        layer.key_proj,
        layer.value_proj,
        layer.output_proj,
        layer.dropout,
    )

"""Multihead latent attention: keys and values from one small vector for each token."""

import dataclasses
from typing import TypedDict, TypeVar, Unpack, final, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Integer, PRNGKeyArray

from ._attention import attention
from ._backend import Backend
from ._cache import KVCache
from ._cache_base import check_sizes
from ._config import AttentionConfig, ChunkSizes, Precision, check_is_a
from ._jax import einsum
from ._layers import (
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
from ._rotary import RotaryEmbedding
from ._typing import Bias, CumSeqlens, KeySegments, Mask, Number, checked
from .functional._options import ScoreOptions

LatentCache = TypeVar("LatentCache", KVCache, PagedKVCache)


class CallOptions(TypedDict, total=False):
    """The keyword arguments of a call, for its overloads."""

    key: PRNGKeyArray | None
    inference: bool | None
    bias: Bias | None
    segment_ids: KeySegments | None
    cum_seqlens: CumSeqlens | None
    positions: Integer[Array, "*#batch length"] | None


@final
class MultiheadLatentAttention(eqx.Module):
    r"""Causal self-attention whose cache is a small vector for each token.

    (DeepSeek-V2, 2024, arXiv 2405.04434.) For a token's vector $h$, the latent $c =
    \text{norm}(W^{DKV} h)$ of `kv_rank` numbers gives the keys and values of all heads,
    $k_i = [W^{UK}_i c, k^R]$ and $v_i = W^{UV}_i c$. The part $k^R$ has its position by
    a rotary embedding, and all heads share it. A head's query is $q_i = [q^C_i,
    q^R_i]$, from $h$ or from a latent of its own.

    A cache keeps $[c, k^R]$ alone. With a cache $W^{UK}$ is absorbed into the query and
    $W^{UV}$ into the output, so that all heads attend to the latents as they are:
    $q^C_i \cdot W^{UK}_i c = (W^{UK}_i)^\intercal q^C_i \cdot c$. Without a cache keys
    and values are made. Both give the same but for rounding.

    A query that sees no key, for a mask, has heads of output 0. The softmax is computed
    in float32 or wider, whatever the dtype.

    **Fields:**

    - `query_down`, `query_norm`: the query's latent and its norm, or None.
    - `query_up`: an `equinox.nn.Linear` to the queries of all heads; each is first
        `qk_size` numbers without and then `rotary.dim` with a position.
    - `kv_down`: to the latent, and then the shared part of the keys.
    - `kv_norm`: of the latent.
    - `kv_up`: to the heads' `qk_size` numbers of a key and then `vo_size` of a value.
    - `output_proj`, `dropout`: as in [`eqx_attention.MultiheadAttention`][].
    - The rest is as given.
    """

    query_down: eqx.nn.Linear | None
    query_norm: Norm | None
    query_up: eqx.nn.Linear
    kv_down: eqx.nn.Linear
    kv_norm: Norm
    kv_up: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    rotary: RotaryEmbedding

    num_heads: int = eqx.field(static=True)
    query_size: int = eqx.field(static=True)
    kv_rank: int = eqx.field(static=True)
    qk_size: int = eqx.field(static=True)
    vo_size: int = eqx.field(static=True)
    config: AttentionConfig = eqx.field(static=True)
    compute_dtype: DTypeLike | None = eqx.field(static=True)
    backend: Backend = eqx.field(static=True)
    chunk_sizes: ChunkSizes | None = eqx.field(static=True)

    @checked
    def __init__(
        self,
        num_heads: int,
        query_size: int,
        kv_rank: int,
        qk_size: int,
        vo_size: int,
        *,
        rotary: RotaryEmbedding,
        query_rank: int | None = None,
        output_size: int | None = None,
        use_bias: bool = False,
        norm_eps: Number = 1e-6,
        softmax_scale: Number | None = None,
        dropout_p: Number = 0.0,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        precision: Precision = None,
        backend: Backend = Backend.AUTO,
        chunk_sizes: ChunkSizes | None = None,
        key: PRNGKeyArray,
    ) -> None:
        """A layer with weights drawn at random.

        **Arguments:**

        - `num_heads`: how many heads.
        - `query_size`: the width of the input.
        - `kv_rank`: the width of the latent of keys and values.
        - `qk_size`: the width of a head's query and key, without the rotary part.
        - `vo_size`: the width of a head's value.
        - `rotary`: an [`eqx_attention.RotaryEmbedding`][]; its `dim` is the width of
            the rotary part. DeepSeek's is `interleaved`.
        - `query_rank`: the width of the query's latent; by default there is none.
        - `output_size`: the width of the output; `query_size` by default.
        - `use_bias`: whether `query_down`, `kv_down` and `output_proj` add a bias;
            False by default.
        - `norm_eps`: of the latents' `equinox.nn.RMSNorm`; by default 1e-6.
        - `softmax_scale`: by default 1 / sqrt(qk_size + rotary.dim).
        - `dropout_p`, `inference`, `dtype`, `compute_dtype`, `precision`, `backend`,
            `chunk_sizes`, `key`: as in [`eqx_attention.MultiheadAttention`][].

        **Raises:** `ValueError` or `TypeError` for what no attention can do.
        """
        output_size = query_size if output_size is None else output_size
        sizes = {"num_heads": num_heads, "kv_rank": kv_rank, "qk_size": qk_size}
        if query_rank is not None:
            sizes["query_rank"] = query_rank
        check_sizes(
            **sizes, query_size=query_size, vo_size=vo_size, output_size=output_size
        )
        for name, size in sizes.items():
            if size == 0:
                raise ValueError(f"{name} is 0, but must be at least 1")
        check_dropout_p(dropout_p)
        check_is_a("backend", backend, Backend)
        if chunk_sizes is not None:
            check_is_a("chunk_sizes", chunk_sizes, ChunkSizes)
        if softmax_scale is None:
            softmax_scale = (qk_size + rotary.dim) ** -0.5
        self.config = AttentionConfig(
            causal=True, softmax_scale=softmax_scale, precision=precision
        )
        keys = jax.random.split(key, 5)

        def linear(
            in_size: int, out_size: int, use_bias: bool, key: PRNGKeyArray
        ) -> eqx.nn.Linear:
            return eqx.nn.Linear(in_size, out_size, use_bias, dtype, key=key)

        def norm(size: int) -> eqx.nn.RMSNorm:
            return eqx.nn.RMSNorm(size, norm_eps, use_bias=False, dtype=dtype)

        self.query_down = self.query_norm = None
        query_in = query_size
        if query_rank is not None:
            self.query_down = linear(query_size, query_rank, use_bias, keys[0])
            self.query_norm = norm(query_rank)
            query_in = query_rank
        query_out = num_heads * (qk_size + rotary.dim)
        self.query_up = linear(query_in, query_out, False, keys[1])
        self.kv_down = linear(query_size, kv_rank + rotary.dim, use_bias, keys[2])
        self.kv_norm = norm(kv_rank)
        self.kv_up = linear(kv_rank, num_heads * (qk_size + vo_size), False, keys[3])
        self.output_proj = linear(num_heads * vo_size, output_size, use_bias, keys[4])
        self.dropout = eqx.nn.Dropout(dropout_p, inference)
        self.rotary = rotary
        self.num_heads, self.query_size = num_heads, query_size
        self.kv_rank, self.qk_size, self.vo_size = kv_rank, qk_size, vo_size
        self.compute_dtype = check_dtype("compute_dtype", compute_dtype)
        self.backend, self.chunk_sizes = backend, chunk_sizes

    @overload
    def __call__(
        self,
        x: Array,
        mask: Mask | None = None,
        *,
        cache: None = None,
        num_tokens: None = None,
        **options: Unpack[CallOptions],
    ) -> Array: ...
    @overload
    def __call__(
        self,
        x: Array,
        mask: Mask | None = None,
        *,
        cache: LatentCache,
        num_tokens: NumTokens | None = None,
        **options: Unpack[CallOptions],
    ) -> tuple[Array, LatentCache]: ...
    @checked
    def __call__(
        self,
        x: Float[Array, "*batch length query_size"],
        mask: Mask | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        bias: Bias | None = None,
        segment_ids: KeySegments | None = None,
        cum_seqlens: CumSeqlens | None = None,
        positions: Integer[Array, "*#batch length"] | None = None,
        cache: LatentCache | None = None,
        num_tokens: NumTokens | None = None,
    ) -> (
        Float[Array, "*batch length output_size"]
        | tuple[Float[Array, "*batch length output_size"], LatentCache]
    ):
        """The output, and with a cache also the new cache.

        **Arguments:**

        - `x`: `*batch length query_size`.
        - `mask`, `bias`, `key`, `inference`, `num_tokens`: as in
            [`eqx_attention.MultiheadAttention`][].
        - `segment_ids`, `cum_seqlens`: of queries and keys, as in
            [`eqx_attention.standard_attention`][].
        - `positions`: integers, `*batch length`: where tokens stand for the rotary
            embedding; by default 0, 1 and so on, after the cache's tokens.
        - `cache`: an [`eqx_attention.KVCache`][] or [`eqx_attention.PagedKVCache`][]
            with one head, keys of `kv_rank + rotary.dim` numbers and values of none, as
            `init_cache` makes it. It is used as in
            [`eqx_attention.MultiheadAttention`][].

        **Returns:**

        The output, `*batch length output_size`; with a cache, `(output, cache)`.

        **Raises:**

        As [`eqx_attention.attention`][]; and `ValueError` for what does not go
        together.
        """
        check_width("x", x, self.query_size)
        dropout_prob = dropout_prob_of(self.dropout, key, inference)
        options = ScoreOptions(
            mask=mask,
            bias=bias,
            softmax_scale=self.config.softmax_scale,
            precision=self.config.precision,
        )
        if cache is None:
            if num_tokens is not None:
                raise ValueError("num_tokens is given, but cache is None")
            query, latent = self._query(x, positions), self._latent(x, positions)
            out = attention(
                query,
                *self._expanded(latent),
                causal=True,
                q_segment_ids=segment_ids,
                cum_seqlens_q=cum_seqlens,
                dropout_prob=dropout_prob,
                dropout_key=key,
                backend=self.backend,
                chunk_sizes=self.chunk_sizes,
                **options,
            )
            return self._output(x, out)
        refuse_together(
            "cache",
            segment_ids=segment_ids,
            cum_seqlens=cum_seqlens,
            dropout=dropout_prob or None,
        )
        if positions is None:
            positions = count_from(lengths_of(cache, x.shape[:-2]), x.shape[-2])
        query, latent = self._query(x, positions), self._latent(x, positions)
        to_key, to_value = self._up_weights(query.dtype)
        absorbed = _per_head("...hd,hdr->...hr", query[..., : self.qk_size], to_key)
        latent = latent[..., None, :]
        out, cache = append_and_attend(
            cache,
            jnp.concatenate((absorbed, query[..., self.qk_size :]), axis=-1),
            latent,
            latent[..., :0],
            num_tokens,
            block_size=None if self.chunk_sizes is None else self.chunk_sizes.key,
            read=_keys_as_values,
            **options,
        )
        out = _per_head("...hr,hvr->...hv", out[..., : self.kv_rank], to_value)
        return self._output(x, out), cache

    def init_cache(
        self, batch_size: int, capacity: int, *, dtype: DTypeLike = jnp.float32
    ) -> KVCache:
        """A cache without tokens, which keeps `kv_rank + rotary.dim` numbers of each.

        **Arguments:** as in [`eqx_attention.KVCache`][].
        """
        width = self.kv_rank + self.rotary.dim
        return KVCache.init(batch_size, capacity, 1, width, 0, dtype=dtype)

    def _query(self, x: Array, positions: Array | None) -> Array:
        """By head: what has no position, and what has."""
        if self.query_down is not None and self.query_norm is not None:
            x = each(self.query_norm, project(self.query_down, x, self.compute_dtype))
        query = project(self.query_up, x, self.compute_dtype)
        query = split_heads(query, self.num_heads)
        plain, turned = jnp.split(query, (self.qk_size,), axis=-1)
        return jnp.concatenate((plain, self.rotary(turned, positions)), axis=-1)

    def _latent(self, x: Array, positions: Array | None) -> Array:
        """What a cache keeps: the latent, and the shared part of the keys."""
        down = project(self.kv_down, x, self.compute_dtype)
        latent, key = jnp.split(down, (self.kv_rank,), axis=-1)
        key = self.rotary(key[..., None, :], positions)[..., 0, :]
        return jnp.concatenate((each(self.kv_norm, latent), key), axis=-1)

    def _expanded(self, latent: Array) -> tuple[Array, Array]:
        """The keys and values of all heads."""
        latent, shared = jnp.split(latent, (self.kv_rank,), axis=-1)
        heads = split_heads(
            project(self.kv_up, latent, self.compute_dtype), self.num_heads
        )
        key, value = jnp.split(heads, (self.qk_size,), axis=-1)
        shared = jnp.broadcast_to(
            shared[..., None, :], (*key.shape[:-1], shared.shape[-1])
        )
        return jnp.concatenate((key, shared), axis=-1), value

    def _up_weights(self, dtype: DTypeLike) -> tuple[Array, Array]:
        """From latents to keys, `heads qk_size kv_rank`; and to values."""
        weight = self.kv_up.weight.astype(dtype)
        weight = weight.reshape(
            self.num_heads, self.qk_size + self.vo_size, self.kv_rank
        )
        to_key, to_value = jnp.split(weight, (self.qk_size,), axis=1)
        return to_key, to_value

    def _output(self, x: Array, out: Array) -> Array:
        out = project(self.output_proj, join_heads(out), self.compute_dtype)
        return out if self.compute_dtype is None else out.astype(x.dtype)


def _per_head(spec: str, heads: Array, weight: Array) -> Array:
    return einsum(spec, heads, weight).astype(heads.dtype)


def _keys_as_values(cache: LatentCache) -> LatentCache:
    """A cache whose values are its keys: nothing is copied."""
    if isinstance(cache, PagedKVCache):
        return dataclasses.replace(
            cache, value_pages=cache.key_pages, value_scale=cache.key_scale
        )
    return dataclasses.replace(cache, value=cache.key, value_scale=cache.key_scale)

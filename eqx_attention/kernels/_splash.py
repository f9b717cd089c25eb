"""Splash attention for TPUs, from JAX's own Pallas kernels.

It takes blocks of 128 tokens or multiples, and skips those that causality or a window
rules out. It does not scale: the query is scaled here, in its own dtype, which rounds
it once more unless the scale is a power of two. A row that sees no key would be a mean
there: segment ids are taken only where each token sees itself. A head has one sink at
most there: several are made one here. Accumulates in float32.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._config import ChunkSizes
from .._jax import x64_is_on
from .._request import Request
from ._kernel import Kernel, Operands, Support

BLOCK = 128
_MODULE = "jax.experimental.pallas.ops.tpu.splash_attention"


def chunk_rule(request: Request) -> ChunkSizes:
    """Blocks of 512, or the most below that which divides: not measured here."""

    def size(length: int) -> int:
        fits = (n for n in (512, 384, 256) if length % n == 0)
        return next(fits, BLOCK)

    return ChunkSizes(size(request.q_len), size(request.kv_len))


def limits(request: Request) -> str | None:
    """Why splash attention can't do what is asked, beyond what `SUPPORT` says."""
    if x64_is_on():
        return "x64 is on, under which its index maps do not trace"
    for name, length in (("query", request.q_len), ("key", request.kv_len)):
        if length % BLOCK:
            return f"{name} has a length of {length}: it needs a multiple of {BLOCK}"
    for size in (request.qk_dim, request.v_dim):
        if size % 64 or size > 256:
            return f"a head is {size} wide: it needs 64, 128, 192 or 256"
    sizes = request.chunk_sizes or chunk_rule(request)
    for size, length in ((sizes.query, request.q_len), (sizes.key, request.kv_len)):
        if size % BLOCK or length % size:
            return (
                f"chunk_sizes has {size}: it needs a multiple of {BLOCK} that divides "
                f"{length}"
            )
    if "softmax_aux" in request.asked and request.dtypes[0] != "float32":
        return "it sums the gradient of softmax_aux in the query's dtype, not float32"
    if "q_segment_ids" in request.asked or "kv_segment_ids" in request.asked:
        if not request.one_set_of_ids or request.q_len != request.kv_len:
            return "q_segment_ids and kv_segment_ids differ, so a query may see no key"
        if request.offset != 0:
            return "with segment ids each token has to see itself: it needs offset 0"
    return None


def attend(request: Request, operands: Operands, *, interpret: bool = False) -> Array:
    """The output of splash attention; by Pallas' interpreter on another device."""
    sizes = request.chunk_sizes or chunk_rule(request)
    kernel = _kernel(
        request.q_heads,
        (request.q_len, request.kv_len),
        (request.left, request.right, request.offset),
        request.logits_soft_cap,
        (sizes.query, sizes.key),
        interpret,
    )
    scale = jnp.asarray(request.softmax_scale, operands.query.dtype)
    ids = None
    if operands.segment_ids is not None:
        ids = _library().SegmentIds(operands.segment_ids, operands.segment_ids)
    out = jax.vmap(kernel, in_axes=(0, 0, 0, None if ids is None else 0, None))(
        jnp.moveaxis(operands.query * scale, 2, 1),
        jnp.moveaxis(operands.key, 2, 1),
        jnp.moveaxis(operands.value, 2, 1),
        ids,
        operands.softmax_aux,
    )
    return jnp.moveaxis(out, 1, 2)


@functools.lru_cache(maxsize=64)
def _kernel(
    q_heads: int,
    shape: tuple[int, int],
    band: tuple[int | None, int | None, int],
    soft_cap: float | None,
    blocks: tuple[int, int],
    interpret: bool,
) -> Any:
    """The kernel, made once: what it masks by is a constant, whatever is traced."""
    splash = _library()
    left, right, offset = band
    if (left, right) == (None, None):
        mask = splash.FullMask(shape)
    elif left is None and right == 0:
        mask = splash.CausalMask(shape, offset)
    else:
        mask = splash.LocalMask(shape, (left, right), offset)
    query, key = blocks
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            splash.MultiHeadMask([mask] * q_heads),
            block_sizes=splash.BlockSizes(
                block_q=query,
                block_kv=key,
                block_kv_compute=key,
                block_q_dkv=query,
                block_kv_dkv=key,
                block_kv_dkv_compute=key,
                block_q_dq=query,
                block_kv_dq=key,
            ),
            attn_logits_soft_cap=soft_cap,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


def _library() -> Any:
    """JAX's module, which has no types; it takes a second to import."""
    return importlib.import_module(_MODULE)


SPLASH = Kernel(
    module="jax",
    package="jax[tpu]",
    platform="tpu",
    device="TPU",
    automatic=True,
    support=Support(
        options={
            "causal": "yes",
            "sliding_window": "yes",
            "alignment": "yes",
            "query_offset": "an int",
            "q_segment_ids": "those of the keys too",
            "kv_segment_ids": "those of the queries too",
            "logits_soft_cap": "yes",
            "softmax_aux": "float32",
            "chunk_sizes": "multiples of 128 that divide the lengths",
        },
        dtypes=("float32", "bfloat16"),
        head_dims="64, 128, 192 or 256; lengths are multiples of 128",
        derivatives="first, reverse mode",
        seen_on="no device; by Pallas' interpreter, and compiled for a TPU v5e",
    ),
    limits=limits,
    attend=attend,
    chunk_rule=chunk_rule,
)

"""Latent attention: expanded, absorbed, and as the paper's formulae have it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from . import reference
from .helpers import close, normal

pytestmark = pytest.mark.numbers

Layer = eqxa.MultiheadLatentAttention
SIZES: dict[str, Any] = {
    "num_heads": 3,
    "query_size": 10,
    "kv_rank": 6,
    "qk_size": 5,
    "vo_size": 4,
    "rotary": eqxa.RotaryEmbedding(2, theta=10.0, interleaved=True),
}


def layer_of(**options: Any) -> Layer:
    layer = Layer(**SIZES, use_bias=True, key=jax.random.key(0), **options)
    weights = jnp.asarray(normal(9, 6))
    return eqx.tree_at(lambda m: m.kv_norm.weight, layer, weights)


def linear(layer: eqx.nn.Linear, x: np.ndarray) -> np.ndarray:
    out = x @ np.asarray(layer.weight, np.float64).T
    return out if layer.bias is None else out + np.asarray(layer.bias)


def norm(layer: Any, x: np.ndarray) -> np.ndarray:
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + layer.eps)
    return x * np.asarray(layer.weight)


def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The one pair of numbers turns by the position: the lowest frequency is 1."""
    pairs = (x[..., 0] + 1j * x[..., 1]) * np.exp(1j * positions)[:, None]
    return np.stack((pairs.real, pairs.imag), -1)


def forward(layer: Layer, x: np.ndarray, positions: Any = None, **options: Any) -> Any:
    """The keys and values of each head, made one head after the other."""
    length = len(x)
    positions = np.arange(length) if positions is None else positions
    hidden = x
    if layer.query_down is not None:
        hidden = norm(layer.query_norm, linear(layer.query_down, x))
    query = linear(layer.query_up, hidden).reshape(length, 3, 7)
    query = np.concatenate((query[..., :5], turn(query[..., 5:], positions)), -1)
    down = linear(layer.kv_down, x)
    latent, shared = (
        norm(layer.kv_norm, down[:, :6]),
        turn(down[:, None, 6:], positions),
    )
    outs: list[np.ndarray] = []
    for head, weight in enumerate(np.split(np.asarray(layer.kv_up.weight), 3)):
        key = np.concatenate((latent @ weight[:5].T, shared[:, 0]), -1)
        value = latent @ weight[5:].T
        one = query[:, head : head + 1], key[:, None], value[:, None]
        scale = layer.config.softmax_scale
        out = reference.attention(*one, causal=True, softmax_scale=scale, **options)
        outs.append(out.output[:, 0])
    return linear(layer.output_proj, np.concatenate(outs, -1))


@pytest.mark.parametrize("query_rank", (None, 8))
def test_expanded(query_rank: int | None) -> None:
    layer, x = layer_of(query_rank=query_rank), normal(0, 7, 10)
    assert np.isclose(layer.config.softmax_scale or 0, 7**-0.5)
    close("output", eqx.filter_jit(layer)(jnp.asarray(x)), forward(layer, x))
    positions, mask = np.array([3, 1, 4, 1, 5, 9, 2]), normal(1, 7, 7) > -1
    options = {"mask": mask, "q_segment_ids": np.array([0, 0, 0, 1, 1, 2, -1])}
    options["kv_segment_ids"] = options["q_segment_ids"]
    found = eqx.filter_jit(layer)(
        *(jnp.asarray(x), jnp.asarray(mask)),
        positions=jnp.asarray(positions),
        segment_ids=jnp.asarray(options["q_segment_ids"]),
    )
    close("output", found, forward(layer, x, positions, **options))


def absorbed(layer: Layer, x: Array, cache: Any, sizes: tuple[int, ...]) -> Array:
    """The outputs of a prompt in chunks, through a cache."""

    @eqx.filter_jit
    def call(x: Array, cache: Any) -> Any:
        return layer(x, cache=cache)

    outs: list[Array] = []
    for part in jnp.split(x, np.cumsum(sizes)[:-1], axis=-2):
        out, cache = call(part, cache)
        outs.append(out)
    return jnp.concatenate(outs, axis=-2)


@pytest.mark.parametrize("kind", ("contiguous", "paged"))
def test_absorbed(kind: str) -> None:
    """In chunks and token by token, from latents alone."""
    layer, x = layer_of(query_rank=8), jnp.asarray(normal(0, 2, 7, 10))
    cache = layer.init_cache(2, 9)
    assert cache.key.shape == (2, 9, 1, 8) and cache.value.size == 0
    if kind == "paged":
        cache = eqxa.PagedKVCache.init(8, 3, 2, 3, 1, 8, 0)
    close("output", absorbed(layer, x, cache, (3, 3, 1)), layer(x))


def test_absorbed_under_vmap() -> None:
    layer, x = layer_of(), jnp.asarray(normal(0, 2, 4, 10))

    @eqx.filter_jit
    def run(x: Array, cache: eqxa.KVCache) -> Any:
        return jax.vmap(lambda x, cache: layer(x, cache=cache, num_tokens=3))(x, cache)

    found, cache = run(x, layer.init_cache(2, 9))
    close("output", found[:, :3], layer(x)[:, :3])
    np.testing.assert_array_equal(cache.lengths, [3, 3])


def test_eight_bits() -> None:
    layer, x = layer_of(), jnp.asarray(normal(0, 1, 4, 10))
    found = absorbed(layer, x, layer.init_cache(1, 4, dtype=jnp.int8), (4,))
    close("output", found, layer(x), 0.02)


def test_gradients() -> None:
    """Through the absorbed form and through the expanded one they are the same."""
    layer, x = layer_of(query_rank=8), jnp.asarray(normal(0, 2, 4, 10))

    @eqx.filter_jit
    @eqx.filter_grad
    def through_cache(layer: Layer) -> Array:
        return jnp.sum(jnp.sin(layer(x, cache=layer.init_cache(2, 4))[0]))

    @eqx.filter_jit
    @eqx.filter_grad
    def at_once(layer: Layer) -> Array:
        return jnp.sum(jnp.sin(layer(x)))

    grads = through_cache(layer), at_once(layer)
    for got, expected in zip(*map(jax.tree.leaves, grads), strict=True):
        close("gradient", got, expected)


def test_compute_dtype() -> None:
    x = jnp.asarray(normal(0, 1, 4, 10))
    layer = layer_of(compute_dtype=jnp.bfloat16)
    cache = layer.init_cache(1, 4, dtype=jnp.bfloat16)
    for out in (layer(x), absorbed(layer, x, cache, (4,))):
        assert out.dtype == jnp.float32
        close("output", out, layer_of()(x), 0.05)


def test_dropout() -> None:
    layer, x = layer_of(dropout_p=0.5), jnp.asarray(normal(0, 4, 10))
    plain = eqx.nn.inference_mode(layer)(x)
    close("output", plain, layer_of()(x))
    assert np.abs(layer(x, key=jax.random.key(0)) - plain).max() > 1e-3


X = jnp.zeros((1, 4, 10))
WRONG: dict[str, tuple[Any, str]] = {
    "rank": (lambda: Layer(1, 4, 0, 2, 2, **ROTARY), "kv_rank is 0, but must be at"),
    "heads": (lambda: Layer(0, 4, 2, 2, 2, **ROTARY), "num_heads is 0, but must be"),
    "width": (lambda: layer_of()(X[..., 1:]), r"x has shape \(1, 4, 9\), but this"),
    "key": (lambda: layer_of(dropout_p=0.5)(X), "key is None, but dropout_p is 0.5"),
    "cache": (
        lambda: layer_of()(X, cache=eqxa.KVCache.init(1, 4, 1, 8)),
        r"cache has keys and values of \(heads, width\) \(1, 8\) and \(1, 8\), but "
        r"this layer has \(1, 8\) and \(1, 0\)",
    ),
    "num_tokens": (lambda: layer_of()(X, num_tokens=1), "num_tokens is given, but ca"),
    "segments": (
        lambda: layer_of()(
            X, segment_ids=jnp.zeros(4, int), cache=layer_of().init_cache(1, 4)
        ),
        "segment_ids is given together with cache",
    ),
}
ROTARY: dict[str, Any] = {"rotary": SIZES["rotary"], "key": jax.random.key(0)}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()

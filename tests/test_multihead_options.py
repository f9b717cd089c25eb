"""What MultiheadAttention does beyond Equinox's, against a forward pass in NumPy."""

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

Layer = eqxa.MultiheadAttention
ROTARY = eqxa.RotaryEmbedding(2, theta=10.0)


def rms_norm(size: int) -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(size, eps=1e-6, use_bias=False)


def layer_of(**options: Any) -> Layer:
    """A layer with all kinds of parameters, none of them 0 or 1."""
    layer = Layer(
        num_heads=4,
        query_size=6,
        qk_size=3,
        vo_size=5,
        num_kv_heads=2,
        use_query_bias=True,
        use_output_bias=True,
        key=jax.random.key(0),
        **options,
    )
    leaves, structure = jax.tree.flatten(eqx.filter(layer, eqx.is_array))
    drawn = [jnp.asarray(normal(i, *x.shape), x.dtype) for i, x in enumerate(leaves)]
    rest = eqx.filter(layer, eqx.is_array, inverse=True)
    return eqx.combine(jax.tree.unflatten(structure, drawn), rest)


def linear(layer: eqx.nn.Linear, x: np.ndarray) -> np.ndarray:
    out = x @ np.asarray(layer.weight, np.float64).T
    return out if layer.bias is None else out + np.asarray(layer.bias)


def norm(layer: Any, x: np.ndarray) -> np.ndarray:
    if layer is None:
        return x
    if isinstance(layer, eqx.nn.LayerNorm):
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + layer.eps)
    x = x * np.asarray(layer.weight)
    return x if layer.bias is None else x + np.asarray(layer.bias)


def turn(rotary: Any, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    if rotary is None:
        return x
    assert rotary.dim == 2
    angle = positions[..., None]
    cos, sin = np.cos(angle), np.sin(angle)
    pair = x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos
    return np.concatenate((np.stack(pair, -1), x[..., 2:]), -1)


def forward(
    layer: Layer,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    q_positions: Any = None,
    kv_positions: Any = None,
    **options: Any,
) -> np.ndarray:
    """What the layer should compute; `options` are those of attention."""

    def heads(proj: eqx.nn.Linear, x: np.ndarray, num_heads: int) -> np.ndarray:
        return linear(proj, x).reshape(*x.shape[:-1], num_heads, -1)

    if q_positions is None:
        q_positions = np.arange(query.shape[-2]) + options.get("query_offset", 0)
    if kv_positions is None:
        kv_positions = np.arange(key.shape[-2])
    q = norm(layer.query_norm, heads(layer.query_proj, query, layer.num_heads))
    k = norm(layer.key_norm, heads(layer.key_proj, key, layer.num_kv_heads))
    out = reference.attention(
        turn(layer.rotary, q, q_positions),
        turn(layer.rotary, k, kv_positions),
        heads(layer.value_proj, value, layer.num_kv_heads),
        softmax_aux=layer.sinks,
        causal=layer.config.causal,
        sliding_window=layer.config.sliding_window,
        softmax_scale=layer.config.softmax_scale,
        logits_soft_cap=layer.config.logits_soft_cap,
        num_sink_tokens=layer.config.num_sink_tokens,
        **options,
    ).output
    out = out.reshape(*query.shape[:-1], -1)
    if layer.gate_proj is not None:
        out = out / (1 + np.exp(-linear(layer.gate_proj, query)))
    return linear(layer.output_proj, out)


def inputs(*batch: int, q_len: int = 7, kv_len: int = 9) -> list[np.ndarray]:
    lengths = q_len, kv_len, kv_len
    return [normal(20 + i, *batch, n, 6) for i, n in enumerate(lengths)]


LAYERS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "causal": {"causal": True, "logits_soft_cap": 2.0, "softmax_scale": 0.7},
    "window": {"causal": True, "sliding_window": 3, "num_sink_tokens": 1},
    "sinks": {"num_sinks": 2},
    "rotary": {"rotary": ROTARY},
    "rms": {"qk_norm": rms_norm, "rotary": ROTARY, "causal": True},
    "layer norm": {"qk_norm": eqx.nn.LayerNorm},
    "gate": {"output_gate": True},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    layer, given = layer_of(**LAYERS[name]), inputs()
    call = eqx.filter_jit(layer)
    close("output", call(*map(jnp.asarray, given)), forward(layer, *given))


CALLS: dict[str, dict[str, Any]] = {
    "mask": {"mask": normal(1, 7, 9) > -1},
    "mask of heads": {"mask": normal(1, 4, 7, 9) > -1},
    "bias": {"bias": normal(1, 4, 1, 9)},
    "sink bias": {"sink_bias": normal(1, 4, 1)},
    "segments": {
        "q_segment_ids": np.array([0, 0, 0, 1, 1, 2, -1]),
        "kv_segment_ids": np.array([0, 0, 0, 0, 1, 1, 1, 2, -1]),
    },
    "packed": {
        "cum_seqlens_q": np.array([0, 3, 7]),
        "cum_seqlens_k": np.array([0, 3, 9]),
    },
    "offset": {"query_offset": 2},
    "positions": {
        "q_positions": np.array([5, 4, 9, 0, 1, 1, 2]),
        "kv_positions": np.arange(9)[::-1],
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    """All options of a call, with all that a layer may have."""
    layer = layer_of(
        causal=True,
        sliding_window=(3, 0),
        num_sink_tokens=1,
        rotary=ROTARY,
        num_sinks=1,
        qk_norm=rms_norm,
        output_gate=True,
    )
    given, options = inputs(), CALLS[name]
    arrays = {
        n: x if n == "query_offset" else jnp.asarray(x) for n, x in options.items()
    }
    found = eqx.filter_jit(layer)(*map(jnp.asarray, given), **arrays)
    close("output", found, forward(layer, *given, **options))


def test_batch_axes() -> None:
    """By `vmap`, and by axes of the arrays; masks and positions of each sequence."""
    layer, given = layer_of(rotary=ROTARY), inputs(2, 3)
    positions = np.random.default_rng(0).integers(0, 9, (2, 3, 7))
    options: dict[str, Any] = {
        "mask": normal(1, 2, 3, 1, 7, 9) > -1,
        "q_positions": positions,
        "kv_positions": np.broadcast_to(np.arange(9), (2, 3, 9)),
    }
    expected = forward(layer, *given, **options)

    @eqx.filter_jit
    def run(arrays: list[Array], options: dict[str, Array]) -> tuple[Array, Array]:
        def one(arrays: list[Array], options: dict[str, Array]) -> Array:
            return layer(*arrays, **options)

        return one(arrays, options), jax.vmap(jax.vmap(one))(arrays, options)

    for found in run(*jax.tree.map(jnp.asarray, (given, options))):
        close("output", found, expected)


def test_positions_serve_both_sides() -> None:
    layer, (query, key, value) = layer_of(rotary=ROTARY), inputs(kv_len=7)
    positions = np.array([5, 4, 9, 0, 1, 1, 2])
    both: dict[str, Any] = {"q_positions": positions, "kv_positions": positions}
    expected = forward(layer, query, key, value, **both)
    for name in both:
        found = layer(
            *map(jnp.asarray, (query, key, value)), **{name: jnp.asarray(positions)}
        )
        close("output", found, expected)


@pytest.mark.parametrize("backend", (eqxa.Backend.STANDARD, eqxa.Backend.FLASH))
def test_backends(backend: eqxa.Backend) -> None:
    sizes = eqxa.ChunkSizes(2, 3) if backend is eqxa.Backend.FLASH else None
    layer = layer_of(causal=True, num_sinks=1, backend=backend, chunk_sizes=sizes)
    given = inputs()
    close("output", layer(*map(jnp.asarray, given)), forward(layer, *given))


def test_a_query_that_sees_nothing() -> None:
    """Its heads are 0, so that the output is the bias of the last projection."""
    layer = layer_of()
    query, key, value = map(jnp.asarray, inputs())
    mask = jnp.arange(7)[:, None] != 2
    out = layer(query, key, value, jnp.broadcast_to(mask, (7, 9)))
    assert layer.output_proj.bias is not None
    np.testing.assert_array_equal(out[2], layer.output_proj.bias)


def test_projected_once() -> None:
    """Keys and values of an encoder serve many queries."""
    layer = layer_of(rotary=ROTARY, qk_norm=rms_norm)
    query, key, value = inputs()
    positions = np.arange(9)[::-1].copy()
    expected = forward(layer, query, key, value, kv_positions=positions)
    projected = eqx.filter_jit(layer.project_kv)(
        jnp.asarray(key), jnp.asarray(value), kv_positions=jnp.asarray(positions)
    )
    assert projected.key.shape == (9, 2, 3) and projected.value.shape == (9, 2, 5)
    step = eqx.filter_jit(layer)
    for t in range(2):
        part = jnp.asarray(query[t : t + 1])
        found = step(part, projected, q_positions=jnp.array([t]))
        close("output", found, expected[t : t + 1])
    batched = jax.vmap(layer, in_axes=(0, None))(jnp.asarray(query[None]), projected)
    close("output", batched[0], expected)


def test_compute_dtype() -> None:
    """Products in bfloat16, parameters and their gradients in float32."""
    wide, narrow = layer_of(), layer_of(compute_dtype=jnp.bfloat16)
    given = list(map(jnp.asarray, inputs()))
    assert {x.dtype for x in jax.tree.leaves(eqx.filter(narrow, eqx.is_array))} == {
        jnp.dtype(jnp.float32)
    }

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(layer: Layer) -> Array:
        return jnp.sum(layer(*given))

    _, grads = loss(narrow)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(grads))
    out = narrow(*given)
    assert out.dtype == jnp.float32
    close("output", out, wide(*given), 0.03)
    assert np.abs(out - wide(*given)).max() > 1e-3
    dtypes: list[Any] = []

    def record(*heads: Array) -> tuple[Array, ...]:
        dtypes.extend(x.dtype for x in heads)
        return heads

    narrow(*given, process_heads=record)
    assert dtypes == [jnp.bfloat16] * 3
    half = [x.astype(jnp.bfloat16) for x in given]
    assert narrow(*half).dtype == jnp.bfloat16


def test_float64() -> None:
    with jax.enable_x64(True):
        layer = Layer(2, 4, rotary=ROTARY, key=jax.random.key(0))
        assert layer.query_proj.weight.dtype == jnp.float64
        x = normal(0, 5, 4).astype(np.float64)
        found = layer(*[jnp.asarray(x)] * 3)
        assert found.dtype == jnp.float64
        close("output", found, forward(layer, x, x, x), 1e-12)


def test_gradients() -> None:
    """By finite differences, along one direction of all parameters."""
    layer = layer_of(
        causal=True,
        num_sinks=1,
        rotary=ROTARY,
        qk_norm=rms_norm,
        output_gate=True,
    )
    given = inputs()
    parameters, rest = eqx.partition(layer, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(parameters)
    direction = jax.tree.unflatten(
        structure, [normal(40 + i, *x.shape) for i, x in enumerate(leaves)]
    )

    def loss(step: float) -> float:
        moved = jax.tree.map(
            lambda x, d: np.asarray(x, np.float64) + step * d, parameters, direction
        )
        return float(np.sin(forward(eqx.combine(moved, rest), *given)).sum())

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layer: Layer) -> Array:
        return jnp.sum(jnp.sin(layer(*map(jnp.asarray, given))))

    slopes = jax.tree.map(
        lambda g, d: np.sum(np.asarray(g, np.float64) * d), gradient(layer), direction
    )
    found = sum(jax.tree.leaves(slopes))
    close("slope", found, (loss(1e-5) - loss(-1e-5)) / 2e-5, 1e-3)
    assert all(np.abs(x) > 1e-3 for x in jax.tree.leaves(slopes))

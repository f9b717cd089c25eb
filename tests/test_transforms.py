"""The same answers under every transformation of JAX."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import (
    BACKENDS,
    DIFFERENTIABLE,
    FEW_BACKENDS,
    Arrays,
    close,
    normal,
    qkv,
)

N = 3
FLOATS: Arrays = qkv(q_len=5, kv_len=7, qk_dim=2, v_dim=2) | {
    "bias": normal(3, 4, 1, 7),
    "softmax_aux": normal(4, 4, 1),
    "sink_bias": normal(5, 1),
    "softmax_scale": np.float32(0.7),
}
OTHERS: Arrays = {
    "mask": normal(6, 2, 1, 5, 7) > -1,
    "query_offset": np.array([2, 1]),
    "q_segment_ids": np.array([[0, 0, 1, 1, -1], [0, 1, 1, 1, 1]]),
    "kv_segment_ids": np.array([[0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 1, 1, 1, 1]]),
}
OPTIONS: dict[str, Any] = {
    "causal": True,
    "sliding_window": (2, 0),
    "num_sink_tokens": 1,
}
EVERYTHING = FLOATS | OTHERS
SUBSETS: tuple[tuple[str, ...], ...] = (
    ("query",),
    ("key", "value"),
    ("mask",),
    ("bias",),
    ("softmax_aux", "sink_bias"),
    ("softmax_scale",),
    ("query_offset",),
    ("q_segment_ids", "kv_segment_ids"),
    tuple(EVERYTHING),
)


def value_and_grad(backend: str) -> Callable[[Arrays], tuple[Array, Arrays]]:
    """One number of a call, and its gradient for everything that has one."""

    def function(arrays: Arrays) -> tuple[Array, Arrays]:
        given = {n: x for n, x in arrays.items() if n not in DIFFERENTIABLE}

        def loss(trained: Arrays) -> Array:
            output, lse = BACKENDS[backend](
                **trained, **given, **OPTIONS, return_lse=True
            )
            seen = jnp.where(lse == -jnp.inf, 0, lse)
            return jnp.sum(jnp.sin(output)) + jnp.sum(seen**2)

        return jax.value_and_grad(loss)(
            {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
        )

    return function


@functools.cache
def compiled_once(backend: str) -> Callable[[Arrays], Any]:
    return jax.jit(value_and_grad(backend))


@pytest.mark.parametrize("over", SUBSETS, ids=lambda s: s[0] if len(s) < 3 else "all")
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_vmap(backend: str, over: tuple[str, ...]) -> None:
    arrays = {n: jnp.asarray(x) for n, x in EVERYTHING.items()}
    for i, name in enumerate(over):
        x = arrays[name]
        if jnp.issubdtype(x.dtype, jnp.floating):
            arrays[name] = jnp.asarray(normal(80 + i, N, *x.shape))
        else:
            arrays[name] = jnp.stack([jnp.roll(x, i, axis=-1) for i in range(N)])
    axes = {n: 0 if n in over else None for n in arrays}
    function = value_and_grad(backend)
    value, grads = jax.jit(jax.vmap(function, in_axes=(axes,)))(arrays)
    one_by_one = compiled_once(backend)
    for i in range(N):
        single = {n: x[i] if n in over else x for n, x in arrays.items()}
        expected_value, expected_grads = one_by_one(single)
        close("value", value[i], expected_value)
        for name, expected in expected_grads.items():
            close(name, grads[name][i], expected)


def test_vmap_is_a_batch_axis() -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}
    for attend in FEW_BACKENDS.values():
        function = functools.partial(attend, causal=True)
        mapped = jax.jit(jax.vmap(lambda a, f=function: f(**a)))(arrays)
        batched = jax.jit(lambda a, f=function: f(**a))(arrays)
        np.testing.assert_allclose(mapped, batched, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_scan_of_checkpointed_layers(backend: str) -> None:
    width = normal(7, 3, 2, 4, std=0.5)
    x = jnp.asarray(normal(8, 2, 6, 2, 4))

    def layer(x: Array, w: Array) -> Array:
        return x + BACKENDS[backend](x, x * w, x, causal=True)

    def scanned(x: Array, width: Array) -> Array:
        step = jax.checkpoint(
            lambda x, w: (layer(x, jnp.broadcast_to(w, x.shape)), None)
        )
        return jnp.sum(jax.lax.scan(step, x, width)[0] ** 2)

    def unrolled(x: Array, width: Array) -> Array:
        for w in width:
            x = layer(x, jnp.broadcast_to(w, x.shape))
        return jnp.sum(x**2)

    found = jax.jit(jax.value_and_grad(scanned, argnums=(0, 1)))(x, jnp.asarray(width))
    expected = jax.jit(jax.value_and_grad(unrolled, argnums=(0, 1)))(
        x, jnp.asarray(width)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        close("scan", a, b, 1e-4)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_shard_map_over_the_batch(backend: str) -> None:
    """Gradients of what is replicated are sums over the devices."""
    arrays = {n: jnp.asarray(x) for n, x in FLOATS.items() if n != "bias"}
    arrays["bias"] = jnp.asarray(normal(9, 2, 4, 1, 7))
    arrays |= {n: jnp.asarray(x) for n, x in OTHERS.items()}
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split = PartitionSpec("x")
    whole = PartitionSpec()
    specs = {n: split for n in arrays}
    specs |= {n: whole for n in ("softmax_aux", "sink_bias", "softmax_scale")}

    def attend(arrays: Arrays) -> Any:
        return BACKENDS[backend](**arrays, **OPTIONS, return_lse=True)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=split)

    def loss(attend: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
        def function(arrays: Arrays) -> tuple[Array, Arrays]:
            given = {n: x for n, x in arrays.items() if n not in DIFFERENTIABLE}

            def number(trained: Arrays) -> Array:
                output, lse = attend({**trained, **given})
                return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(lse < -1e9, 0, lse))

            trained = {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
            return jax.value_and_grad(number)(trained)

        return function

    value, grads = jax.jit(loss(sharded))(arrays)
    expected_value, expected_grads = jax.jit(loss(attend))(arrays)
    close("value", value, expected_value)
    for name, expected in expected_grads.items():
        close(name, grads[name], expected)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_shard_map_with_replicated_keys(backend: str) -> None:
    arrays = qkv(q_len=8, batch=())
    query, key, value = (jnp.asarray(x) for x in arrays.values())
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split, whole = PartitionSpec("x"), PartitionSpec()
    attend = BACKENDS[backend]
    sharded = jax.shard_map(
        lambda q, k, v: attend(q, k, v),
        mesh=mesh,
        in_specs=(split, whole, whole),
        out_specs=split,
    )

    def loss(attend: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *arrays: jnp.sum(jnp.sin(attend(*arrays)))

    found = jax.jit(jax.grad(loss(sharded), argnums=(0, 1, 2)))(query, key, value)
    expected = jax.jit(jax.grad(loss(attend), argnums=(0, 1, 2)))(query, key, value)
    for name, a, b in zip(("query", "key", "value"), found, expected, strict=True):
        close(name, a, b)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_filter_jit_takes_options_as_they_are(backend: str) -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}
    compiled = eqx.filter_jit(BACKENDS[backend])
    options = {"causal": True, "alignment": eqxa.Alignment.BOTTOM_RIGHT}
    found = compiled(**arrays, **options, sliding_window=(2, None), softmax_scale=0.3)
    expected = BACKENDS[backend](
        **arrays, **options, sliding_window=(2, None), softmax_scale=0.3
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_scan_over_traced_offsets(backend: str) -> None:
    """Chunks of a long prompt against its cache, one after the other."""
    arrays = {n: jnp.asarray(x) for n, x in qkv(q_len=8, kv_len=8).items()}
    whole = BACKENDS[backend](**arrays, causal=True)
    chunks = jnp.swapaxes(arrays["query"].reshape(2, 4, 2, 4, 3), 0, 1)

    def step(start: Array, query: Array) -> tuple[Array, Array]:
        output = BACKENDS[backend](
            query, arrays["key"], arrays["value"], causal=True, query_offset=start
        )
        return start + 2, output

    _, outputs = jax.jit(lambda c: jax.lax.scan(step, jnp.int32(0), c))(chunks)
    found = jnp.swapaxes(outputs, 0, 1).reshape(whole.shape)
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)

"""MultiheadAttention under what a person trains a model with."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, PRNGKeyArray

import eqx_attention as eqxa

from .helpers import close, normal

pytestmark = pytest.mark.numbers

Layer = eqxa.MultiheadAttention


def layer_of(key: PRNGKeyArray) -> Layer:
    return Layer(
        num_heads=4,
        query_size=8,
        num_kv_heads=2,
        causal=True,
        dropout_p=0.25,
        rotary=eqxa.RotaryEmbedding(2),
        qk_norm=eqx.nn.LayerNorm,
        output_gate=True,
        num_sinks=1,
        key=key,
    )


X = normal(0, 5, 8)


def test_serialisation(tmp_path: Path) -> None:
    layer = layer_of(jax.random.key(0))
    eqx.tree_serialise_leaves(tmp_path / "layer.eqx", layer)
    like = eqx.filter_eval_shape(layer_of, jax.random.key(1))
    loaded = eqx.tree_deserialise_leaves(tmp_path / "layer.eqx", like)
    assert eqx.tree_equal(loaded, layer)


def test_stacked_layers() -> None:
    """A scan over layers, with checkpoints and dropout: as one layer after another."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = eqx.filter_vmap(layer_of)(keys)
    arrays, rest = eqx.partition(layers, eqx.is_array)

    def stacked(arrays: Any, x: Array) -> Array:
        @eqx.filter_checkpoint
        def step(x: Array, layer_and_key: tuple[Any, Array]) -> tuple[Array, None]:
            layer, key = eqx.combine(layer_and_key[0], rest), layer_and_key[1]
            return x + layer(x, x, x, key=key), None

        return jax.lax.scan(step, x, (arrays, keys))[0]

    def one_by_one(arrays: Any, x: Array) -> Array:
        for i in range(3):
            parts = [leaf[i] for leaf in jax.tree.leaves(arrays)]
            layer = jax.tree.unflatten(jax.tree.structure(arrays), parts)
            layer = eqx.combine(layer, rest)
            x = x + layer(x, x, x, key=keys[i])
        return x

    def loss(arrays: Any, run: Any) -> Array:
        return jnp.sum(run(arrays, jnp.asarray(X)) ** 2)

    found, expected = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(arrays, run)
        for run in (stacked, one_by_one)
    )
    for got, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        close("loss or gradient", got, want)


def test_optax() -> None:
    """A few steps bring the loss down, and all parameters move."""
    layer = layer_of(jax.random.key(0))
    optimiser = optax.adam(1e-2)

    @eqx.filter_jit
    def train(layer: Layer, state: Any, key: Array) -> tuple[Layer, Any, Array]:
        @eqx.filter_value_and_grad
        def loss(layer: Layer, x: Array, keys: Array) -> Array:
            out = jax.vmap(lambda x, key: layer(x, x, x, key=key))(x, keys)
            return jnp.mean((out - x[:, ::-1]) ** 2)

        x = jnp.stack([jnp.asarray(X), jnp.asarray(X[::-1])])
        value, grads = loss(layer, x, jax.random.split(key, 2))
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(layer, updates), state, value

    new, state = layer, optimiser.init(eqx.filter(layer, eqx.is_array))
    losses: list[float] = []
    for key in jax.random.split(jax.random.key(1), 30):
        new, state, value = train(new, state, key)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    parameters = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (layer, new))
    assert all(np.any(a != b) for a, b in zip(*parameters, strict=True))


def test_ensemble() -> None:
    """Several layers at once, by `filter_vmap` over their parameters."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = eqx.nn.inference_mode(eqx.filter_vmap(layer_of)(keys))
    x = jnp.asarray(X)
    found = eqx.filter_vmap(lambda layer: layer(x, x, x))(layers)
    for i in range(3):
        layer = eqx.nn.inference_mode(layer_of(keys[i]))
        close("output", found[i], layer(x, x, x))

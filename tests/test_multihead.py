"""MultiheadAttention takes the place of Equinox's, with the same numbers."""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import close, normal

SIZES: dict[str, int] = {
    "num_heads": 2,
    "query_size": 3,
    "key_size": 5,
    "value_size": 7,
    "output_size": 11,
    "qk_size": 4,
    "vo_size": 6,
}
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


def inputs() -> tuple[Array, Array, Array]:
    """A query, a key and a value of the sizes above."""
    shapes = (9, 3), (8, 5), (8, 7)
    query, key, value = (jnp.asarray(normal(i, *s)) for i, s in enumerate(shapes))
    return query, key, value


def same_leaves(a: Any, b: Any) -> None:
    leaves = jax.tree.leaves(a), jax.tree.leaves(b)
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_array_equal(x, y)


# What stands in equinox's own tests of its layer.


def test_names_and_defaults() -> None:
    """All that Equinox's takes, in its order, with its defaults."""
    for name in ("__init__", "__call__"):
        theirs, ours = (
            inspect.signature(getattr(layer, name)).parameters
            for layer in (eqx.nn.MultiheadAttention, eqxa.MultiheadAttention)
        )
        for parameter in theirs.values():
            assert ours[parameter.name].kind is parameter.kind
            # What was projected before comes without a value.
            if parameter.name != "value":
                assert ours[parameter.name].default == parameter.default
        positional = [n for n, p in theirs.items() if p.kind is not p.KEYWORD_ONLY]
        assert list(ours)[: len(positional)] == positional


@pytest.mark.parametrize("options", ({}, SIZES | BIASES), ids=("defaults", "all"))
def test_same_weights(options: dict[str, Any]) -> None:
    options = {"num_heads": 2, "query_size": 4, **options, "key": jax.random.key(0)}
    theirs = eqx.nn.MultiheadAttention(**options)
    same_leaves(eqxa.MultiheadAttention(**options), theirs)
    fields = vars(eqxa.MultiheadAttention(**options))
    for name, value in vars(theirs).items():
        if not isinstance(value, eqx.Module):
            assert fields[name] == value, name


@pytest.mark.parametrize("mask_shape", ((), (9, 8), (2, 9, 8)), ids=str)
def test_same_result(mask_shape: tuple[int, ...]) -> None:
    theirs = eqx.nn.MultiheadAttention(**SIZES, **BIASES, key=jax.random.key(0))
    ours = eqxa.MultiheadAttention(**SIZES, **BIASES, key=jax.random.key(0))
    mask = normal(3, *mask_shape) > -0.5 if mask_shape else None

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(layer: Any) -> Array:
        return jnp.sum(jnp.sin(layer(*inputs(), mask)))

    for got, expected in zip(
        jax.tree.leaves(loss(ours)), jax.tree.leaves(loss(theirs)), strict=True
    ):
        close("loss or gradient", got, expected)


def test_known_numbers() -> None:
    """A query that sees one key gets its value, in any number of ways to say so."""
    layer = eqxa.MultiheadAttention(num_heads=2, query_size=4, key=jax.random.key(0))
    weights = jnp.arange(16.0).reshape(4, 4)
    layer = eqx.tree_at(
        lambda m: [
            *(m.query_proj.weight, m.key_proj.weight),
            *(m.value_proj.weight, m.output_proj.weight),
        ],
        layer,
        [weights] * 4,
    )
    x = 1.0 + jnp.arange(12.0).reshape(3, 4)
    expected = np.broadcast_to(weights @ (weights @ x[0]), (3, 4))
    np.testing.assert_array_equal(layer(x[:1], x[:1], x[:1]), expected[:1])
    first = np.array([True, False, False])
    for shape in ((3, 3), (2, 3, 3)):
        mask = np.broadcast_to(first, shape)
        np.testing.assert_array_equal(layer(x, x, x, jnp.asarray(mask)), expected)
        np.testing.assert_array_equal(layer(x, x, x, mask=mask), expected)


def test_dropout() -> None:
    options: dict[str, Any] = {"num_heads": 2, "query_size": 10, "dropout_p": 0.5}
    layer = eqxa.MultiheadAttention(**options, key=jax.random.key(0))
    x = jnp.asarray(normal(0, 3, 10))
    keys = jax.random.split(jax.random.key(1))
    plain = layer(x, x, x, inference=True)
    np.testing.assert_array_equal(layer(x, x, x, key=keys[0], inference=True), plain)
    with pytest.warns(UserWarning, match="inference"):
        np.testing.assert_array_equal(layer(x, x, x, deterministic=True), plain)
    dropped = layer(x, x, x, key=keys[0])
    np.testing.assert_array_equal(layer(x, x, x, key=keys[0]), dropped)
    assert np.abs(dropped - plain).max() > 0.01
    assert np.abs(dropped - layer(x, x, x, key=keys[1])).max() > 0.01
    with pytest.raises(ValueError, match=r"key is None, but dropout_p is 0\.5"):
        layer(x, x, x)
    inferring = eqxa.MultiheadAttention(
        **options, inference=True, key=jax.random.key(0)
    )
    assert eqx.tree_equal(eqx.nn.inference_mode(layer), inferring)
    np.testing.assert_array_equal(inferring(x, x, x, key=keys[0]), plain)


def test_process_heads() -> None:
    """It sees what it sees in Equinox, and may not change a shape."""
    theirs = eqx.nn.MultiheadAttention(**SIZES, key=jax.random.key(0))
    ours = eqxa.MultiheadAttention.from_equinox(theirs)

    def process(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        return query[::-1], 2 * key, jnp.roll(value, 1, axis=1)

    expected = theirs(*inputs(), process_heads=process)
    close("output", ours(*inputs(), process_heads=process), expected)
    with pytest.raises(ValueError, match="process_heads returned heads of shapes"):
        ours(*inputs(), process_heads=lambda q, k, v: (q[1:], k, v))


# From Equinox, and back.


SWITCHED = """
import jax

from {module} import MultiheadAttention

attention = MultiheadAttention(num_heads=2, query_size=4, key=jax.random.key(0))
x = jax.random.normal(jax.random.key(1), (5, 6, 4))
out = jax.jit(jax.vmap(attention))(x, x, x)
"""


def test_one_import_is_all_that_changes() -> None:
    results: list[Array] = []
    for module in ("equinox.nn", "eqx_attention"):
        names: dict[str, Any] = {}
        exec(SWITCHED.format(module=module), names)
        results.append(names["out"])
    close("output", *results)


def test_round_trip() -> None:
    theirs = eqx.nn.MultiheadAttention(
        **SIZES, **BIASES, dropout_p=0.25, inference=True, key=jax.random.key(0)
    )
    ours = eqxa.MultiheadAttention.from_equinox(theirs)
    assert eqx.tree_equal(ours.to_equinox(), theirs)
    close("output", ours(*inputs()), theirs(*inputs()))
    causal = eqxa.MultiheadAttention.from_equinox(theirs, causal=True)
    mask = jnp.tril(jnp.ones((9, 8), bool))
    close("output", causal(*inputs()), theirs(*inputs(), mask))


EXTRA: dict[str, dict[str, Any]] = {
    "num_kv_heads": {"num_kv_heads": 1},
    "causal": {"causal": True},
    "sliding_window": {"sliding_window": 3},
    "logits_soft_cap": {"logits_soft_cap": 5.0},
    "softmax_scale": {"softmax_scale": 1.0},
    "num_sinks": {"num_sinks": 1},
    "num_sink_tokens": {"num_sink_tokens": 1},
    "rotary": {"rotary": eqxa.RotaryEmbedding(2)},
    "qk_norm": {"qk_norm": eqx.nn.RMSNorm},
    "output_gate": {"output_gate": True},
    "compute_dtype": {"compute_dtype": jnp.bfloat16},
}


@pytest.mark.parametrize("name", EXTRA)
def test_what_equinox_has_not(name: str) -> None:
    layer = eqxa.MultiheadAttention(2, 4, **EXTRA[name], key=jax.random.key(0))
    with pytest.raises(ValueError, match=f"this layer has {name}, which equinox"):
        layer.to_equinox()


def test_options_leave_the_weights_as_they_are() -> None:
    plain, full = (
        eqxa.MultiheadAttention(2, 4, **options, key=jax.random.key(0))
        for options in (
            {},
            EXTRA["num_sinks"] | EXTRA["output_gate"] | EXTRA["qk_norm"],
        )
    )
    for name in ("query_proj", "key_proj", "value_proj", "output_proj"):
        same_leaves(getattr(plain, name), getattr(full, name))
    gate = full.gate_proj
    assert gate is not None
    others = plain.query_proj, plain.key_proj, plain.value_proj, plain.output_proj
    assert not any(np.any(gate.weight == other.weight) for other in others)


# What is refused.


def made(*sizes: int, **options: Any) -> eqxa.MultiheadAttention:
    return eqxa.MultiheadAttention(*sizes, **options, key=jax.random.key(0))


X = jnp.zeros((5, 8))
WRONG: dict[str, tuple[Any, str]] = {
    "sizes": (lambda: made(3, 8), "query_size is 8, which is not a multiple of num_he"),
    "kv heads": (
        lambda: made(4, 8, num_kv_heads=3),
        "num_heads is 4, which is not a positive multiple of num_kv_heads = 3",
    ),
    "no kv heads": (lambda: made(4, 8, num_kv_heads=0), "multiple of num_kv_heads = 0"),
    "no heads": (lambda: made(0, 8), "num_heads is 0"),
    "negative": (lambda: made(2, 8, vo_size=-1), "vo_size is -1, but must not be neg"),
    "no width": (lambda: made(2, 8, qk_size=0), "qk_size is 0, but must be at least"),
    "rotary": (
        lambda: made(2, 8, rotary=eqxa.RotaryEmbedding(6)),
        "rotary turns 6 numbers of a head, but qk_size is 4",
    ),
    "qk_norm": (
        lambda: made(2, 8, qk_norm=eqx.nn.RMSNorm(4)),
        "qk_norm is a layer, but must be what makes one",
    ),
    "dropout": (lambda: made(2, 8, dropout_p=1.5), "dropout_p is 1.5, but must lie"),
    "compute_dtype": (
        lambda: made(2, 8, compute_dtype=jnp.int32),
        "compute_dtype is int32, but must be a floating dtype",
    ),
    "width": (
        lambda: made(2, 8)(X, X, X[:, :7]),
        r"value has shape \(5, 7\), but this layer takes vectors of 8 numbers",
    ),
    "no value": (lambda: made(2, 8)(X, X), "value is None, but only a ProjectedKV"),
    "a value too many": (
        lambda: made(2, 8)(X, made(2, 8).project_kv(X, X), X),
        "value is given together with a ProjectedKV as key_",
    ),
    "process_heads": (
        lambda: made(2, 8)(
            X, made(2, 8).project_kv(X, X), process_heads=lambda q, k, v: (q, k, v)
        ),
        "process_heads is given together with a ProjectedKV",
    ),
    "positions": (
        lambda: made(2, 8)(X, X, X, q_positions=jnp.arange(5)),
        "q_positions or kv_positions need a rotary embedding",
    ),
    "positions of one side": (
        lambda: made(2, 8, rotary=eqxa.RotaryEmbedding(2))(
            X, X[:3], X[:3], kv_positions=jnp.arange(3)
        ),
        "alone serve both only if query and key_ are of one length, .* 5 and 3",
    ),
    "num_tokens": (
        lambda: made(2, 8)(X, X, X, num_tokens=2),
        "num_tokens is given, but cache is None",
    ),
    "mask": (
        lambda: made(2, 8)(X, X, X, jnp.ones((4, 5), bool)),
        r"mask has shape \(4, 5\), which does not broadcast",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()

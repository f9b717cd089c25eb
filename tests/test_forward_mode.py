"""Forward mode through flash attention: the tangents of standard attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import Arrays, close, flash, normal, qkv

pytestmark = pytest.mark.numbers

BOTH = eqxa.Differentiation.BOTH
TRAINED: Arrays = qkv(20) | {
    "bias": normal(23, 4, 1, 9),
    "softmax_aux": normal(24, 2),
    "sink_bias": normal(25, 4, 1),
    "softmax_scale": np.float32(0.6),
}
OPTIONS: dict[str, Any] = {"num_sink_tokens": 1, "logits_soft_cap": 1.5}
SEGMENTS = np.array([[0, 0, 1, 1, 1, -1], [-1, 0, 0, 0, 2, 2]])
# What is given beside the arrays that have tangents, and the options.
CASES: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "window": ({}, {"causal": True, "sliding_window": (2, 0)}),
    "offsets": ({"query_offset": np.array([3, -2])}, {"causal": True}),
    "mask": ({"mask": normal(26, 2, 4, 6, 9) > 0}, {}),
    "segments": (
        {"q_segment_ids": SEGMENTS, "kv_segment_ids": np.repeat(SEGMENTS, 2, 1)[:, :9]},
        {},
    ),
    "packed": (
        {"cum_seqlens_q": np.array([0, 2, 5]), "cum_seqlens_k": np.array([0, 4, 7])},
        {"causal": True, "alignment": eqxa.Alignment.BOTTOM_RIGHT},
    ),
    "dropout": ({}, {"dropout_prob": 0.3, "dropout_key": jax.random.key(5)}),
}


def as_arrays(arrays: Arrays) -> Arrays:
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def directions(arrays: Arrays, seed: int = 60) -> Arrays:
    return {
        name: jnp.asarray(normal(seed + i, *np.shape(x)), x.dtype)
        for i, (name, x) in enumerate(arrays.items())
    }


def tangents(
    attend: Callable[..., Any], given: Arrays, **options: Any
) -> tuple[Any, Any]:
    """Output and lse, and their tangents."""
    trained = as_arrays(TRAINED)

    @jax.jit
    def run(trained: Arrays, direction: Arrays, given: Arrays) -> Any:
        def function(trained: Arrays) -> Any:
            return attend(**trained, **given, **OPTIONS, **options, return_lse=True)

        return jax.jvp(function, (trained,), (direction,))

    return run(trained, directions(trained), as_arrays(given))


@pytest.mark.parametrize("case", CASES)
def test_tangents(case: str) -> None:
    """Through output and lse, along a direction in which everything changes."""
    given, options = CASES[case]
    expected = tangents(eqxa.standard_attention, given, **options)
    found = tangents(flash(4, 4), given, **options, differentiation=BOTH)
    for name, x, y in zip(("output", "lse"), found[0], expected[0], strict=True):
        close(name, x, y)
    for name, x, y in zip(("output", "lse"), found[1], expected[1], strict=True):
        close(f"tangent of {name}", x, y, 1e-4)
        assert np.abs(np.asarray(x)).max() > 0.1


def test_one_tangent_alone() -> None:
    """What does not change costs nothing, and is not taken for what does."""
    trained = as_arrays(TRAINED)
    direction = directions(trained)

    def each(attend: Callable[..., Array]) -> dict[str, Array]:
        def along(name: str) -> Array:
            def function(x: Array) -> Array:
                return attend(**(trained | {name: x}), **OPTIONS, causal=True)

            return jax.jvp(function, (trained[name],), (direction[name],))[1]

        return jax.jit(lambda: {name: along(name) for name in trained})()

    expected = each(eqxa.standard_attention)
    found = each(functools.partial(flash(6, 9), differentiation=BOTH))
    for name, x in found.items():
        close(f"tangent along {name}", x, expected[name], 1e-4)
        assert np.abs(np.asarray(x)).max() > 1e-2


@pytest.mark.parametrize("case", ("window", "dropout"))
def test_the_modes_agree(case: str) -> None:
    """Values and gradients are the same, whichever mode is asked for."""
    given, options = CASES[case]
    trained = as_arrays(TRAINED)

    def value_and_grad(differentiation: eqxa.Differentiation) -> Any:
        def loss(trained: Arrays) -> Array:
            out, lse = flash(4, 4)(
                **trained,
                **OPTIONS,
                **options,
                differentiation=differentiation,
                return_lse=True,
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse < -1e9, 0, lse))

        return jax.jit(jax.value_and_grad(loss))(trained)

    assert not given
    expected = jax.tree.leaves(value_and_grad(eqxa.Differentiation.REVERSE))
    for x, y in zip(jax.tree.leaves(value_and_grad(BOTH)), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_what_is_not_seen_may_be_nan() -> None:
    """Neither values nor tangents of keys that no query sees come to anything."""
    arrays = as_arrays(qkv(kv_len=9))
    direction = directions(arrays)
    mask = jnp.arange(9) % 4 != 1

    def run(arrays: Arrays, direction: Arrays) -> Any:
        def function(arrays: Arrays) -> Any:
            return flash(4, 4)(
                **arrays, mask=mask, differentiation=BOTH, return_lse=True
            )

        return jax.jvp(function, (arrays,), (direction,))

    def spoilt(arrays: Arrays) -> Arrays:
        return {
            name: jnp.where(mask[None, :, None, None], x, jnp.nan)
            if name in ("key", "value")
            else x
            for name, x in arrays.items()
        }

    jitted = jax.jit(run)
    found = jitted(spoilt(arrays), spoilt(direction))
    for x, y in zip(
        jax.tree.leaves(found), jax.tree.leaves(jitted(arrays, direction)), strict=True
    ):
        np.testing.assert_array_equal(x, y)
        assert np.isfinite(np.asarray(x)).all()


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float64))
def test_dtypes(dtype: Any, x64: None) -> None:
    """A tangent has the dtype of what it is one of."""
    arrays = {name: jnp.asarray(x, dtype) for name, x in qkv().items()}
    direction = directions(arrays)

    def run(attend: Callable[..., Any]) -> Any:
        def function(arrays: Arrays) -> Any:
            return attend(**arrays, return_lse=True)

        return jax.jit(lambda: jax.jvp(function, (arrays,), (direction,)))()

    expected = jax.tree.leaves(run(eqxa.standard_attention))
    found = run(functools.partial(flash(4, 4), differentiation=BOTH))
    for x, y in zip(jax.tree.leaves(found), expected, strict=True):
        assert x.dtype == y.dtype
        close("tangent", x, y, 2e-2 if dtype == jnp.bfloat16 else 1e-10)


def test_partial_results_have_tangents() -> None:
    arrays = as_arrays(qkv())

    def parts(arrays: Arrays) -> tuple[Array, Array]:
        def part(first: int, last: int) -> eqxa.PartialAttention:
            return eqxa.flash_attention(
                arrays["query"],
                arrays["key"][:, first:last],
                arrays["value"][:, first:last],
                differentiation=BOTH,
                normalize_output=False,
            )

        return part(0, 5).merge(part(5, 9)).finish()

    def whole(arrays: Arrays) -> tuple[Array, Array]:
        return eqxa.standard_attention(**arrays, return_lse=True)

    direction = directions(arrays)
    found = jax.jit(lambda: jax.jvp(parts, (arrays,), (direction,)))()
    expected = jax.jit(lambda: jax.jvp(whole, (arrays,), (direction,)))()
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        close("part", x, y, 1e-4)


def test_vmap_over_dropout_keys() -> None:
    arrays = as_arrays(qkv())
    keys = jax.random.split(jax.random.key(0), 2)

    def tangent(key: Array) -> Array:
        def function(arrays: Arrays) -> Array:
            return flash(4, 4)(
                **arrays, dropout_prob=0.5, dropout_key=key, differentiation=BOTH
            )

        return jax.jvp(function, (arrays,), (directions(arrays),))[1]

    found = jax.jit(jax.vmap(tangent))(keys)
    for i, key in enumerate(keys):
        close("tangent", found[i], jax.jit(tangent)(key))


def test_transpose_of_the_tangent() -> None:
    """One direction may be of a batch, and the other the same for all of it."""
    arrays = as_arrays(qkv())
    points = arrays["query"], arrays["key"]
    d_queries = jnp.asarray(normal(80, 3, *points[0].shape))
    cotangent = jnp.asarray(normal(81, 3, *points[0].shape[:-1], 5))

    def transposed(attend: Callable[..., Array]) -> Any:
        def function(query: Array, key: Array) -> Array:
            return attend(query, key, arrays["value"])

        def tangents(d_queries: Array, d_key: Array) -> Array:
            def tangent(d_query: Array) -> Array:
                return jax.jvp(function, points, (d_query, d_key))[1]

            return jax.vmap(tangent)(d_queries)

        pull = jax.linear_transpose(tangents, d_queries, arrays["key"])
        return jax.jit(pull)(cotangent)

    found = transposed(functools.partial(flash(4, 4), differentiation=BOTH))
    expected = transposed(eqxa.standard_attention)
    for x, y in zip(found, expected, strict=True):
        close("transpose", x, y, 1e-4)


def test_every_backend_takes_the_config() -> None:
    """Standard attention and decoding are open to both modes anyhow."""
    attend = eqxa.Attention(eqxa.AttentionConfig(differentiation=BOTH))
    arrays = as_arrays(qkv(q_len=1))
    direction = directions(arrays)
    seen = np.arange(9) < np.array([7, 9]).reshape(2, 1, 1, 1)

    def decode(arrays: Arrays) -> Array:
        return attend(**arrays, sequence_end=jnp.asarray([7, 9]))

    def standard(arrays: Arrays) -> Array:
        return attend(**arrays, mask=jnp.asarray(seen))

    found = jax.jit(lambda: jax.jvp(decode, (arrays,), (direction,)))()
    expected = jax.jit(lambda: jax.jvp(standard, (arrays,), (direction,)))()
    for x, y in zip(found, expected, strict=True):
        close("decode", x, y, 1e-4)


def test_memory_grows_as_the_length() -> None:
    """Of the value and its tangent together."""

    def tangent(arrays: Arrays, direction: Arrays) -> Any:
        def function(arrays: Arrays) -> Array:
            return flash(512, 512)(**arrays, causal=True, differentiation=BOTH)

        return jax.jvp(function, (arrays,), (direction,))

    def size(length: int) -> int:
        shapes = {
            name: jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
            for name in ("query", "key", "value")
        }
        memory = jax.jit(tangent).lower(shapes, shapes).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    short, long = size(4096), size(16384)
    assert long < 4.2 * short + 2**16
    assert long < 4 * 16384**2 / 8


@pytest.mark.parametrize("wrong", ("both", True, None))
def test_other_modes_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="differentiation"):
        eqxa.AttentionConfig(differentiation=wrong)
    with pytest.raises(TypeError, match="differentiation"):
        eqxa.flash_attention(**as_arrays(qkv()), differentiation=wrong)

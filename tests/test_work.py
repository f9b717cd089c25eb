"""What flash attention costs: memory, program size, and chunks that are not read."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import Arrays, flash, qkv

pytestmark = pytest.mark.numbers

CHUNK = 512
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": (300, 0)},
    "dropout": {"dropout_prob": 0.1},
}


def shapes(length: int, **extra: Any) -> Arrays:
    """Shapes alone: nothing of this size is ever made."""
    spec = jax.ShapeDtypeStruct
    return {
        "query": spec((1, length, 2, 8), jnp.float32),
        "key": spec((1, length, 1, 8), jnp.float32),
        "value": spec((1, length, 1, 8), jnp.float32),
        "bias": spec((1, 2, 1, length), jnp.float32),
        "q_segment_ids": spec((1, length), jnp.int32),
        **extra,
    }


def loss_of(chunk: int, **options: Any) -> Any:
    """Value and gradients of a call."""
    if "dropout_prob" in options:
        options["dropout_key"] = jax.random.key(0)

    def loss(trained: Arrays, q_segment_ids: Array) -> Array:
        output = flash(chunk, chunk)(**trained, q_segment_ids=q_segment_ids, **options)
        return jnp.sum(output**2)

    return loss


def split(arrays: Arrays) -> tuple[Arrays, Any]:
    ids = arrays.pop("q_segment_ids")
    return arrays, ids


@pytest.mark.parametrize("gradient", (False, True), ids=("forward", "gradient"))
@pytest.mark.parametrize("name", OPTIONS)
def test_memory_and_program_grow_as_they_may(name: str, gradient: bool) -> None:
    """Memory as the length, and the program not at all."""
    loss = loss_of(CHUNK, **OPTIONS[name])
    function = jax.grad(loss) if gradient else loss
    sizes, lines = [], []
    for length in (4096, 16384):
        compiled = jax.jit(function).lower(*split(shapes(length))).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        sizes.append(memory.temp_size_in_bytes)
        lines.append(len(compiled.as_text().splitlines()))
    square = 4 * 16384**2
    assert sizes[1] < 4.2 * sizes[0] + 2**16
    assert sizes[1] < square / 8
    assert abs(lines[1] - lines[0]) <= 0.02 * lines[0]


def array_sizes(jaxpr: Any) -> Iterator[tuple[int, str]]:
    """The number of elements of every array that a program makes."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            shape = getattr(variable.aval, "shape", ())
            yield int(np.prod(shape, dtype=int)), equation.primitive.name
        for parameter in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from array_sizes(inner)


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_square(name: str) -> None:
    function = jax.value_and_grad(loss_of(32, **OPTIONS[name]))
    jaxpr = jax.make_jaxpr(function)(*split(shapes(1024)))
    largest = max(array_sizes(jaxpr.jaxpr))
    assert largest[0] < 1024 * 1024 / 8, largest


def test_the_standard_backend_is_square() -> None:
    """What the test above looks for is there to be found."""

    def loss(query: Array, key: Array, value: Array) -> Array:
        return jnp.sum(eqxa.standard_attention(query, key, value))

    arrays = shapes(1024)
    jaxpr = jax.make_jaxpr(loss)(arrays["query"], arrays["key"], arrays["value"])
    assert max(array_sizes(jaxpr.jaxpr))[0] >= 1024 * 1024


def poisoned(at: slice) -> Arrays:
    """Sixteen tokens, and NaN in some keys and values."""
    arrays = qkv(batch=(), q_len=16, kv_len=16)
    arrays["key"][at] = arrays["value"][at] = np.nan
    return {n: jnp.asarray(x) for n, x in arrays.items()}


# What rules chunks out, the keys that hold NaN, and the queries that never meet their
# chunk. A chunk that is read and masked would spread NaN: 0 times NaN is NaN.
SKIPPED: dict[str, tuple[dict[str, Any], slice, slice]] = {
    "causal": ({"causal": True}, slice(12, 16), slice(0, 12)),
    "window": ({"sliding_window": (3, 0)}, slice(0, 4), slice(8, 16)),
    "window on both sides": ({"sliding_window": (2, 2)}, slice(0, 4), slice(8, 16)),
    "static offset": (
        {"causal": True, "query_offset": -4},
        slice(8, 16),
        slice(0, 12),
    ),
    "traced offset": (
        {"causal": True, "query_offset": jnp.asarray(-4)},
        slice(8, 16),
        slice(0, 12),
    ),
    "segments": (
        {"q_segment_ids": jnp.asarray([0] * 8 + [1] * 8)},
        slice(8, 16),
        slice(0, 8),
    ),
    "packed": (
        {"cum_seqlens_q": jnp.asarray([0, 4, 12, 16])},
        slice(4, 12),
        slice(0, 4),
    ),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_chunks_that_are_ruled_out_are_not_read(name: str) -> None:
    options, nan, clean = SKIPPED[name]
    arrays = poisoned(nan)

    def loss(arrays: Arrays) -> Array:
        output = flash(4, 4)(**arrays, **options)
        return jnp.sum(output[clean] ** 2), output

    grads, output = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    expected = flash(4, 4)(
        **(arrays | {n: jnp.nan_to_num(arrays[n]) for n in ("key", "value")}), **options
    )
    np.testing.assert_allclose(output[clean], expected[clean], rtol=1e-5, atol=1e-6)
    assert np.isfinite(grads["query"][clean]).all()
    assert np.isnan(output).any()


def test_tracing_is_once_for_all_values() -> None:
    """Offsets, lengths and scales are data: new ones compile nothing."""
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}
    traced = 0

    @jax.jit
    def attend(offset: Array, scale: Array, cum_seqlens: Array) -> Array:
        nonlocal traced
        traced += 1
        return eqxa.flash_attention(
            **arrays,
            causal=True,
            query_offset=offset,
            softmax_scale=scale,
            cum_seqlens_q=cum_seqlens,
            cum_seqlens_k=cum_seqlens,
        )

    attend(jnp.int32(0), jnp.float32(1), jnp.asarray([0, 2, 6]))
    attend(jnp.int32(3), jnp.float32(2), jnp.asarray([0, 4, 5]))
    assert traced == 1

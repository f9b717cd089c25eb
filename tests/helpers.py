"""What the tests share: the backends, arrays to call them with, and the comparison."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import eqx_attention as eqxa

from . import reference

Arrays = dict[str, Any]
Attend = Callable[..., Any]

DIFFERENTIABLE = (
    "query",
    "key",
    "value",
    "bias",
    "softmax_aux",
    "sink_bias",
    "softmax_scale",
)


def flash(query: int, key: int) -> Attend:
    """Flash attention that takes `query` queries and `key` keys at a time."""
    sizes = eqxa.ChunkSizes(query=query, key=key)
    return functools.partial(eqxa.flash_attention, chunk_sizes=sizes)


# Of six queries and nine keys, these chunks divide neither, both, and are longer.
BACKENDS: dict[str, Attend] = {
    "standard": eqxa.standard_attention,
    "flash-4x4": flash(4, 4),
    "flash-2x3": flash(2, 3),
    "flash-6x9": flash(6, 9),
    "flash-1x16": flash(1, 16),
    "auto": eqxa.attention,
}
# One of each kind, where a test is about an option and not about chunks.
FEW_BACKENDS = {name: BACKENDS[name] for name in ("standard", "flash-4x4")}


def normal(seed: int, *shape: int, dtype: Any = np.float32, std: float = 1.0) -> Any:
    """Normally distributed numbers, rounded to `dtype` once."""
    return (std * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def qkv(
    seed: int = 0,
    *,
    batch: tuple[int, ...] = (2,),
    q_len: int = 6,
    kv_len: int = 9,
    q_heads: int = 4,
    kv_heads: int = 2,
    qk_dim: int = 3,
    v_dim: int = 5,
    dtype: Any = np.float32,
) -> Arrays:
    """A query, a key and a value, by name."""
    return {
        "query": normal(seed, *batch, q_len, q_heads, qk_dim, dtype=dtype),
        "key": normal(seed + 1, *batch, kv_len, kv_heads, qk_dim, dtype=dtype),
        "value": normal(seed + 2, *batch, kv_len, kv_heads, v_dim, dtype=dtype),
    }


class Found(NamedTuple):
    """What a call gave: its results, and the gradients by name."""

    output: np.ndarray
    lse: np.ndarray
    gradients: dict[str, np.ndarray]


def cotangents(arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Fixed cotangents for the output and the lse."""
    query, value = arrays["query"], arrays["value"]
    d_output = normal(90, *query.shape[:-1], value.shape[-1])
    d_lse = normal(91, *query.shape[:-3], query.shape[-2], query.shape[-3])
    return d_output, d_lse


def compiled(attend: Attend, **options: Any) -> Callable[[Arrays], Found]:
    """A function from arrays to results and all gradients, which compiles once."""

    @jax.jit
    def run(trained: Arrays, given: Arrays, d_output: Array, d_lse: Array) -> Any:
        def function(trained: Arrays) -> tuple[Array, Array]:
            named = {**trained, **given}
            query, key, value = (named.pop(n) for n in ("query", "key", "value"))
            return attend(query, key, value, return_lse=True, **named, **options)

        (output, lse), pullback = jax.vjp(function, trained)
        (grads,) = pullback((d_output.astype(output.dtype), d_lse.astype(lse.dtype)))
        return output, lse, grads

    def found(arrays: Arrays) -> Found:
        arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
        trained = {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
        given = {n: x for n, x in arrays.items() if n not in DIFFERENTIABLE}
        directions = (jnp.asarray(x) for x in cotangents(arrays))
        return Found(*jax.tree.map(np.asarray, run(trained, given, *directions)))

    return found


def call(attend: Attend, arrays: Arrays, **options: Any) -> Found:
    """Results and all gradients of one call of `attend`."""
    return compiled(attend, **options)(arrays)


def output_of(attend: Attend, arrays: Arrays, **options: Any) -> np.ndarray:
    """The output alone."""
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    return np.asarray(jax.jit(lambda arrays: attend(**arrays, **options))(arrays))


def want(arrays: Arrays, **options: Any) -> Found:
    """What `call` should find, by the reference."""
    options = {name: x for name, x in options.items() if name != "logits_dtype"}
    if "alignment" in options:
        options["alignment"] = options["alignment"].value
    named = {n: x for n, x in arrays.items() if n != "dropout_key"}
    query, key, value = (named.pop(n) for n in ("query", "key", "value"))
    result = reference.attention(query, key, value, **named, **options)
    grads = reference.gradients(
        query, key, value, *cotangents(arrays), **named, **options
    )
    return Found(result.output, result.lse, grads)


def close(name: str, got: Any, expected: Any, tolerance: float = 3e-5) -> None:
    """Asserts equality up to `tolerance` of the largest number, -inf in its places."""
    got, expected = np.asarray(got), np.asarray(expected).astype(np.float64)
    assert got.shape == expected.shape, f"{name}: {got.shape}, not {expected.shape}"
    got = got.astype(np.float64)
    assert not np.isnan(got).any(), f"{name} has NaN"
    empty = np.isneginf(expected)
    np.testing.assert_array_equal(np.isneginf(got), empty, err_msg=f"{name}: -inf")
    got, expected = np.where(empty, 0, got), np.where(empty, 0, expected)
    scale = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(
        got, expected, rtol=tolerance, atol=tolerance * scale, err_msg=name
    )


def agree(got: Found, expected: Found, tolerance: float = 3e-5) -> None:
    """Asserts that results and every gradient agree."""
    close("output", got.output, expected.output, tolerance)
    close("lse", got.lse, expected.lse, tolerance)
    for name, gradient in got.gradients.items():
        close(f"gradient of {name}", gradient, expected.gradients[name], tolerance)


def check(
    attend: Attend, arrays: Arrays, *, tolerance: float = 3e-5, **options: Any
) -> Found:
    """Asserts that `attend` does what the reference does, and returns what it did."""
    got = call(attend, arrays, **options)
    agree(got, want(arrays, **options), tolerance)
    return got

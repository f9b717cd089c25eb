"""Dtypes come out as they went in, and errors are those of the dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attention as eqxa

from .helpers import BACKENDS, FEW_BACKENDS, Arrays, agree, call, normal, qkv, want

pytestmark = pytest.mark.numbers

TOLERANCES = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 3e-5}


def arrays_of(dtype: str, **dtypes: str) -> Arrays:
    arrays = qkv() | {"bias": normal(3, 4, 6, 9), "softmax_aux": normal(4, 4, 1)}
    return {n: jnp.asarray(x, dtypes.get(n, dtype)) for n, x in arrays.items()}


def check_dtypes(
    backend: str, arrays: Arrays, tolerance: float, **options: Any
) -> None:
    found = call(BACKENDS[backend], arrays, **options)
    assert found.output.dtype == arrays["query"].dtype
    assert found.lse.dtype == np.promote_types(arrays["query"].dtype, np.float32)
    for name, gradient in found.gradients.items():
        assert gradient.dtype == arrays[name].dtype, name
    agree(found, want(arrays, **options), tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_one_dtype(backend: str, dtype: str) -> None:
    check_dtypes(backend, arrays_of(dtype), TOLERANCES[dtype], causal=True)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_float64(backend: str, x64: None) -> None:
    arrays = {n: x.astype(np.float64) for n, x in arrays_of("float32").items()}
    check_dtypes(backend, arrays, 1e-12, causal=True, softmax_scale=0.7)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_under_x64(backend: str, dtype: str, x64: None) -> None:
    """Nothing grows to 64 bits unasked, and 64-bit integers serve."""
    arrays = arrays_of(dtype) | {
        "query_offset": jnp.asarray([2, 1], jnp.int64),
        "q_segment_ids": jnp.zeros((2, 6), jnp.int64),
        "kv_segment_ids": jnp.zeros((2, 9), jnp.int64),
    }
    check_dtypes(backend, arrays, TOLERANCES[dtype], sliding_window=(2, 1))


@pytest.mark.parametrize(
    "dtypes",
    (
        {"query": "float32", "key": "bfloat16", "value": "bfloat16"},
        {"query": "bfloat16", "key": "float32", "value": "float32"},
        {"query": "bfloat16", "key": "bfloat16", "value": "float32"},
        {"query": "float32", "key": "float32", "value": "bfloat16"},
        {"query": "float16", "key": "bfloat16", "value": "float16"},
        {"bias": "float16", "softmax_aux": "bfloat16"},
    ),
    ids=lambda dtypes: "-".join(dtypes.values()),
)
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_mixed(backend: str, dtypes: dict[str, str]) -> None:
    check_dtypes(backend, arrays_of("float32", **dtypes), 2e-2)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_products_do_not_overflow(backend: str) -> None:
    """Scores of 1e5 fit into float32, whatever the query's dtype."""
    arrays = {n: jnp.asarray(100 * x, jnp.float16) for n, x in qkv(qk_dim=64).items()}
    found = call(BACKENDS[backend], arrays, softmax_scale=5e-4)
    expected = want(arrays, softmax_scale=5e-4)
    assert np.isfinite(found.output).all()
    agree(found._replace(gradients={}), expected, 1e-2)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_sums_of_many_keys_in_bfloat16(backend: str) -> None:
    """A running sum in bfloat16 would stop growing at 256."""
    query = jnp.zeros((1, 1, 1), jnp.bfloat16)
    key, value = jnp.zeros((2, 2048, 1, 1), jnp.bfloat16)
    ones = jnp.ones_like(value)
    output, lse = BACKENDS[backend](query, key, ones, return_lse=True)
    np.testing.assert_array_equal(output, np.ones((1, 1, 1)))
    np.testing.assert_allclose(lse, np.log(2048), rtol=1e-5)
    half = jnp.where(jnp.arange(2048) < 1024, 1, 3).astype(jnp.bfloat16)
    output = BACKENDS[backend](query, key, half.reshape(2048, 1, 1))
    np.testing.assert_array_equal(output.astype(jnp.float32), np.full((1, 1, 1), 2.0))


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_logits_dtype(backend: str, x64: None) -> None:
    """Wider logits are exact to their own dtype; narrower ones round."""
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}
    expected = want(arrays).output
    errors = {}
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
        output = BACKENDS[backend](**arrays, logits_dtype=dtype)
        assert output.dtype == jnp.float32
        errors[dtype] = np.abs(np.asarray(output, np.float64) - expected).max()
    assert errors[jnp.float64] < 3e-6
    assert errors[jnp.float32] < 3e-6
    assert 1e-4 < errors[jnp.bfloat16] < 5e-2


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_scale_of_any_kind(backend: str) -> None:
    """A NumPy or a traced scale is the float it is; a new value traces nothing anew."""
    arrays = {n: jnp.asarray(x, jnp.bfloat16) for n, x in qkv().items()}
    traced = 0

    @jax.jit
    def attend(scale: jax.Array) -> jax.Array:
        nonlocal traced
        traced += 1
        return BACKENDS[backend](**arrays, softmax_scale=scale)

    outputs = [
        BACKENDS[backend](**arrays, softmax_scale=0.5),
        BACKENDS[backend](**arrays, softmax_scale=np.float64(0.5)),
        BACKENDS[backend](**arrays, softmax_scale=jnp.asarray(0.5, jnp.bfloat16)),
        attend(jnp.float32(0.5)),
    ]
    attend(jnp.float32(0.7))
    assert traced == 1
    expected = want(arrays, softmax_scale=0.5).output
    for output in outputs:
        assert output.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(output, np.float64), expected, 2e-2, 2e-2)


def test_results_in_parts_are_float32() -> None:
    arrays = {n: jnp.asarray(x, jnp.bfloat16) for n, x in qkv().items()}
    part = eqxa.flash_attention(**arrays, normalize_output=False)
    for x in (part.numerator, part.max_logits, part.denominator):
        assert x.dtype == jnp.float32

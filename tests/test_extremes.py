"""Arguments at the ends of their ranges, and numbers that are not numbers."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa
from eqx_attention.functional import _online_softmax

from .helpers import BACKENDS, FEW_BACKENDS, Arrays, check, close, normal, qkv

pytestmark = pytest.mark.numbers


def arrays(**shape: Any) -> Arrays:
    return {n: jnp.asarray(x) for n, x in qkv(**shape).items()}


@pytest.mark.parametrize("offset", (2**31 - 1, 2**31, -(2**31), 2**40))
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_an_offset_beyond_all_tokens(backend: str, offset: int) -> None:
    """All keys are in the past, or all are in the future."""
    output, lse = BACKENDS[backend](
        **arrays(), causal=True, query_offset=offset, return_lse=True
    )
    if offset < 0:
        assert not output.any() and np.isneginf(lse).all()
    else:
        close("output", output, BACKENDS[backend](**arrays()))


@pytest.mark.parametrize("window", ((sys.maxsize, 0), (None, 2**31), (2**31 - 1, 0)))
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_a_window_beyond_all_tokens(backend: str, window: Any) -> None:
    right = window[1] if window[1] == 0 else None
    expected = BACKENDS[backend](**arrays(), sliding_window=(None, right))
    close("output", BACKENDS[backend](**arrays(), sliding_window=window), expected)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_nan_in_a_bias_is_seen(backend: str) -> None:
    """Only minus infinity forbids a pair."""
    bias = normal(3, 6, 9)
    bias[2, 3] = np.nan
    output = BACKENDS[backend](**arrays(), bias=jnp.asarray(bias), causal=False)
    assert np.isnan(output[:, 2]).all()
    assert np.isfinite(np.delete(np.asarray(output), 2, axis=1)).all()


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_weights_are_those_of_the_output(dtype: Any) -> None:
    """However coarse the logits are, and with sinks."""
    given = arrays() | {"bias": jnp.asarray(normal(4, 6, 9, std=20.0))}
    output, weights = eqxa.standard_attention(
        **given, logits_dtype=dtype, return_weights=True
    )
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    value = jnp.repeat(given["value"], 2, axis=2)
    close("output", output, jnp.einsum("bhqk,bkhd->bqhd", weights, value))


@pytest.mark.parametrize("kind", ("threefry2x32", "rbg", "unsafe_rbg"))
def test_dropout_by_any_kind_of_key(kind: str) -> None:
    options = {"dropout_prob": 0.4, "dropout_key": jax.random.key(3, impl=kind)}
    expected = eqxa.standard_attention(**arrays(), **options)
    for backend in ("flash-4x4", "flash-1x16"):
        close("output", BACKENDS[backend](**arrays(), **options), expected)


def test_logits_of_1e9() -> None:
    """They round to multiples of 64, and come out as numbers all the same."""
    given = {n: x * 3e4 if n != "value" else x for n, x in arrays().items()}
    for attend in BACKENDS.values():
        assert np.isfinite(attend(**given)).all()


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_operation_by_operation(backend: str) -> None:
    """As one looks for an error with `jax.disable_jit`."""
    with jax.disable_jit():
        check(BACKENDS[backend], qkv(), causal=True)


@pytest.mark.parametrize("own", ("mask", "q_segment_ids", "query_offset"))
def test_second_derivatives_where_batch_elements_differ(own: str) -> None:
    """Each then has its own chunks to visit."""
    given = {
        "mask": jnp.asarray(normal(5, 2, 1, 6, 9) > -0.5),
        "q_segment_ids": jnp.asarray([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 4, 4]]),
        "query_offset": jnp.asarray([0, 3]),
    }[own]
    inputs = arrays(kv_len=6 if own == "q_segment_ids" else 9)

    def slope(backend: str) -> Array:
        def loss(query: Array) -> Array:
            output = BACKENDS[backend](
                **(inputs | {"query": query, own: given}), causal=True
            )
            return jnp.sum(jnp.sin(output))

        def squared(query: Array) -> Array:
            return jnp.sum(jax.grad(loss)(query) ** 2)

        return jax.jit(jax.grad(squared))(inputs["query"])

    close("second derivative", slope("flash-4x4"), slope("standard"))


def test_ids_that_do_not_fit(x64: None) -> None:
    """Ids are compared as int32: what that would cut is an error in debugging."""
    ids = jnp.asarray([5, 5, 5 + 2**32, 5, 5, 5])
    with pytest.raises(Exception, match="q_segment_ids has numbers that do not fit"):
        eqxa.standard_attention(**arrays(kv_len=6), q_segment_ids=ids[None])


def test_pages_that_are_not_there() -> None:
    query, pages = jnp.ones((1, 4, 3)), jnp.ones((3, 4, 2, 3))
    start, end = jnp.asarray([0]), jnp.asarray([7])
    for wrong in (-1, 3):
        table = jnp.asarray([[0, wrong, 99]])
        with pytest.raises(Exception, match="page_table must name pages from 0 to 2"):
            eqxa.paged_decode_attention(query, pages, pages, table, start, end)
    unused = jnp.asarray([[0, 1, 99]])
    eqxa.paged_decode_attention(query, pages, pages, unused, start, end)


def test_the_fast_exponential() -> None:
    """As close as its comment says, exactly 0 far below, and NaN stays."""
    logits = np.concatenate([-np.linspace(0, 87, 100_001), [-np.inf, -1e30, np.nan]])
    logits = logits.astype(np.float32)
    fast = jax.jit(lambda x: _online_softmax.fast_exp_below(x, jnp.float32(0)))(logits)
    exact = np.exp(logits[:-3].astype(np.float64))
    error = np.abs(np.asarray(fast)[:-3] - exact) / exact
    assert np.all(error < 1.2e-7 * (2 - logits[:-3]))
    np.testing.assert_array_equal(fast[-3:], [0, 0, np.nan])

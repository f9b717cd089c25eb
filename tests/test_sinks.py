"""Sink logits, sink tokens and their learned bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import BACKENDS, FEW_BACKENDS, call, check, normal, output_of, qkv

pytestmark = pytest.mark.numbers


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_take_their_share(backend: str) -> None:
    """Without scores, n keys of value 1 and a sink s give n / (n + e^s), once."""
    sinks = np.array([[0, 1], [2, -np.inf]], np.float32)
    arrays = {
        "query": np.zeros((6, 2, 3), np.float32),
        "key": np.ones((9, 1, 3), np.float32),
        "value": np.ones((9, 1, 1), np.float32),
        "softmax_aux": sinks,
    }
    found = call(BACKENDS[backend], arrays, softmax_scale=5.0)
    mass = np.exp(sinks).sum(-1)
    expected = np.broadcast_to(9 / (9 + mass), (6, 2))
    np.testing.assert_allclose(found.output[..., 0], expected, rtol=1e-5)
    np.testing.assert_allclose(found.lse, np.log(9 + mass)[:, None].repeat(6, 1), 1e-5)
    assert all(np.isfinite(x).all() for x in found.gradients.values())


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_gradient_by_hand(backend: str) -> None:
    """One key and one sink: a logistic function of their difference."""
    one = jnp.ones((1, 1, 1))

    def output(query: jax.Array, key: jax.Array, sinks: jax.Array) -> jax.Array:
        return BACKENDS[backend](query, key, 2 * one, softmax_aux=sinks).sum()

    found = jax.jit(jax.grad(output, argnums=(0, 1, 2)))(one, one, jnp.zeros(1))
    slope = 2 * np.e / (1 + np.e) ** 2
    found = [float(x.sum()) for x in found]
    np.testing.assert_allclose(found, [slope, slope, -slope], rtol=1e-5)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_sinks_far_above_and_below(backend: str) -> None:
    for level in (-1e4, 1e4):
        arrays = qkv() | {"softmax_aux": np.array([level, level - 1], np.float32)}
        found = check(BACKENDS[backend], arrays)
        assert all(np.isfinite(x).all() for x in found.gradients.values())


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_no_sinks_at_all(backend: str) -> None:
    arrays = qkv() | {"softmax_aux": np.zeros((4, 0), np.float32)}
    found = check(BACKENDS[backend], arrays)
    assert found.gradients["softmax_aux"].shape == (4, 0)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_sink_bias_is_on_the_first_keys_alone(backend: str) -> None:
    """It is the bias that has it in these columns and 0 elsewhere."""
    learned, spread = normal(3, 4, 2), np.zeros((4, 1, 9), np.float32)
    spread[:, 0, :2] = learned
    attend, cap = BACKENDS[backend], {"logits_soft_cap": 1.0}
    found = output_of(attend, qkv() | {"sink_bias": learned}, num_sink_tokens=2, **cap)
    expected = output_of(attend, qkv() | {"bias": spread}, **cap)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_more_sink_tokens_than_keys(backend: str) -> None:
    arrays = qkv() | {"sink_bias": normal(3, 4, 12)}
    found = check(BACKENDS[backend], arrays, num_sink_tokens=12, sliding_window=(0, 0))
    np.testing.assert_array_equal(found.gradients["sink_bias"][:, 9:], 0)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_sink_tokens_obey_all_but_the_window(backend: str) -> None:
    arrays = qkv(kv_len=6) | {
        "mask": normal(3, 2, 1, 6, 6) > -0.5,
        "q_segment_ids": np.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, -1]]),
        "sink_bias": normal(4, 3),
    }
    check(
        BACKENDS[backend], arrays, num_sink_tokens=3, causal=True, sliding_window=(1, 0)
    )

"""Dropout depends on the key and the position alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attention as eqxa

from .helpers import BACKENDS, FEW_BACKENDS, agree, call, flash, qkv, want

pytestmark = pytest.mark.numbers

PROB = 0.5


def keep(
    attend: Any,
    *,
    batch: tuple[int, ...] = (2,),
    q_len: int = 6,
    kv_len: int = 9,
    seed: int = 1,
    **options: Any,
) -> np.ndarray:
    """The weights that are kept: without scores, one-hot values show them."""
    query = jnp.zeros((*batch, q_len, 4, 1))
    key = jnp.zeros((*batch, kv_len, 2, 1))
    value = jnp.broadcast_to(jnp.eye(kv_len)[:, None], (*batch, kv_len, 2, kv_len))

    @jax.jit
    def weights(dropout_key: jax.Array) -> jax.Array:
        return attend(
            query, key, value, dropout_prob=PROB, dropout_key=dropout_key, **options
        )

    output = np.asarray(weights(jax.random.key(seed)))
    kept = output > 0
    np.testing.assert_allclose(output[kept], 1 / kv_len / (1 - PROB), rtol=1e-5)
    return np.swapaxes(kept, -2, -3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_everywhere(backend: str) -> None:
    expected = keep(eqxa.standard_attention)
    np.testing.assert_array_equal(keep(BACKENDS[backend]), expected)


def test_same_bits_in_a_longer_sequence() -> None:
    short = keep(eqxa.standard_attention)
    long = keep(flash(5, 7), q_len=13, kv_len=20, batch=(3,))
    np.testing.assert_array_equal(long[:2, :, :6, :9], short)


def test_statistics() -> None:
    kept = keep(eqxa.standard_attention, batch=(3,), q_len=32, kv_len=48)
    share = kept.mean()
    assert abs(share - (1 - PROB)) < 4 * (PROB * (1 - PROB) / kept.size) ** 0.5
    other = keep(eqxa.standard_attention, batch=(3,), q_len=32, kv_len=48, seed=2)
    pairs = {
        "key": (kept, other),
        "row": (kept[:, :, 1:], kept[:, :, :-1]),
        "column": (kept[..., 1:], kept[..., :-1]),
        "diagonal": (kept[:, :, 1:, 1:], kept[:, :, :-1, :-1]),
        "transpose": (kept[..., :32], np.swapaxes(kept[..., :32], -1, -2)),
        "16 rows on": (kept[:, :, :16], kept[:, :, 16:]),
        "16 columns on": (kept[..., :16], kept[..., 16:32]),
    }
    pairs |= {f"head {h}": (kept[:, 0], kept[:, h]) for h in range(1, 4)}
    pairs |= {f"batch {b}": (kept[0], kept[b]) for b in range(1, 3)}
    for name, (a, b) in pairs.items():
        agreement = (a == b).mean()
        assert abs(agreement - 0.5) < 5 * (0.25 / a.size) ** 0.5, (name, agreement)


def test_two_batch_axes_are_independent() -> None:
    kept = keep(eqxa.standard_attention, batch=(2, 2), q_len=16, kv_len=16)
    flat = kept.reshape(4, -1)
    for i in range(4):
        for j in range(i):
            agreement = (flat[i] == flat[j]).mean()
            assert abs(agreement - 0.5) < 5 * (0.25 / flat[i].size) ** 0.5


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_forward_and_backward_agree(backend: str) -> None:
    arrays = qkv() | {"softmax_aux": np.ones(1, np.float32)}
    options = {"causal": True, "dropout_prob": PROB}
    pattern = keep(eqxa.standard_attention)
    expected = want(arrays, **options, keep=pattern)
    arrays["dropout_key"] = jax.random.key(1)
    agree(call(BACKENDS[backend], arrays, **options), expected)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_masking_moves_no_bit(backend: str) -> None:
    """Keys that are masked take no part, and change no other's fate."""
    mask = jnp.arange(9) != 4
    query, key = jnp.zeros((2, 6, 4, 1)), jnp.zeros((2, 9, 2, 1))
    value = jnp.broadcast_to(jnp.eye(9)[:, None], (2, 9, 2, 9))
    output = BACKENDS[backend](
        query, key, value, mask=mask, dropout_prob=PROB, dropout_key=jax.random.key(1)
    )
    kept = np.swapaxes(np.asarray(output) > 0, 1, 2)
    expected = keep(eqxa.standard_attention) & np.asarray(mask)
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_all_and_nothing(backend: str) -> None:
    arrays = qkv() | {"dropout_key": jax.random.key(1)}
    nothing = call(BACKENDS[backend], arrays, dropout_prob=1.0)
    assert not nothing.output.any()
    plain = call(BACKENDS[backend], qkv())
    np.testing.assert_array_equal(nothing.lse, plain.lse)
    assert not nothing.gradients["value"].any()
    everything = call(BACKENDS[backend], arrays, dropout_prob=0.0)
    np.testing.assert_array_equal(everything.output, plain.output)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_nothing_has_no_gradient(backend: str) -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}

    def loss(arrays: dict[str, Any]) -> jax.Array:
        return jnp.sum(
            BACKENDS[backend](**arrays, dropout_prob=1, dropout_key=jax.random.key(0))
        )

    for name, gradient in jax.jit(jax.grad(loss))(arrays).items():
        assert not np.asarray(gradient).any(), name


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_without_a_key(backend: str) -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}
    with pytest.raises(ValueError, match="dropout_key"):
        BACKENDS[backend](**arrays, dropout_prob=0.1)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_mapped_keys(backend: str) -> None:
    """Mapping over keys is one call for each; old-style keys serve as well."""
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}

    def attend(key: jax.Array) -> jax.Array:
        return BACKENDS[backend](**arrays, dropout_prob=PROB, dropout_key=key)

    keys = jax.random.split(jax.random.key(3), 2)
    found = jax.jit(jax.vmap(attend))(keys)
    for i in range(2):
        np.testing.assert_allclose(
            found[i], jax.jit(attend)(keys[i]), rtol=1e-5, atol=1e-6
        )
    assert np.abs(found[0] - found[1]).max() > 0.1
    np.testing.assert_allclose(
        found[0], attend(jax.random.key_data(keys[0])), rtol=1e-5, atol=1e-6
    )

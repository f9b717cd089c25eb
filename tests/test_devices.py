"""Programs for devices that are not there: they lower, which is all that is known."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import FEW_BACKENDS, Arrays, qkv


@pytest.fixture(autouse=True)
def without_checks_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """These call back to Python, which is not there when a program is exported."""
    monkeypatch.setattr("eqx_attention._typing.DEBUG", False)
    monkeypatch.setattr("eqx_attention.functional._checks.DEBUG", False)
    jax.clear_caches()


def lower(platform: str, function: Any, *arguments: Any) -> str:
    exported = jax.export.export(jax.jit(function), platforms=[platform])(*arguments)
    return exported.mlir_module()


@pytest.mark.parametrize("platform", ("cuda", "tpu"))
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_lowers(backend: str, platform: str) -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}

    def loss(arrays: Arrays, key: Array) -> Array:
        output = FEW_BACKENDS[backend](
            **arrays, causal=True, dropout_prob=0.1, dropout_key=key
        )
        return jnp.sum(output**2)

    text = lower(platform, jax.value_and_grad(loss), arrays, jax.random.key(0))
    assert "dot_general" in text


@pytest.mark.parametrize("platform", ("cuda", "tpu"))
def test_decode_lowers(platform: str) -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv(q_len=1).items()}
    lengths = jnp.asarray([4, 9])

    def attend(arrays: Arrays, end: Array) -> Array:
        return eqxa.ragged_decode_attention(
            **arrays, sequence_start=jnp.zeros_like(end), sequence_end=end
        )

    assert "stablehlo.while" in lower(platform, attend, arrays, lengths)

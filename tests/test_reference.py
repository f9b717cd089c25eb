"""The reference's gradients are those of its own results, by finite differences."""

from typing import Any

import numpy as np
import pytest

from . import reference
from .helpers import cotangents, normal, qkv

SMALL = {"q_len": 3, "kv_len": 4, "qk_dim": 2, "v_dim": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": normal(3, 2, 1, 1, 4)},
    "bias-kv-heads": {"bias": normal(3, 2, 3, 4)},
    "softmax_aux": {"softmax_aux": normal(4, 2), "causal": True},
    "softmax_aux-heads": {"softmax_aux": normal(4, 4, 1), "sliding_window": (0, 0)},
    "sink_bias": {"num_sink_tokens": 2, "sink_bias": normal(5, 2)},
    "sink_bias-heads": {
        "num_sink_tokens": 1,
        "sink_bias": normal(5, 4, 1),
        "cum_seqlens_q": np.array([0, 1, 3]),
        "cum_seqlens_k": np.array([0, 2, 3]),
    },
    "soft cap": {"logits_soft_cap": 0.7, "bias": normal(6, 4, 3, 4)},
    "dropout": {"dropout_prob": 0.5, "keep": normal(7, 2, 4, 3, 4) > 0},
    "mask": {"mask": normal(8, 2, 1, 3, 4) > 0.3},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    arrays = {n: x.astype(np.float64) for n, x in qkv(20, **SMALL).items()}
    options = dict(CASES[case], softmax_scale=0.6)
    d_output, d_lse = cotangents(arrays)
    found = reference.gradients(*arrays.values(), d_output, d_lse, **options)

    def loss(name: str, x: Any) -> float:
        named = {**arrays, **options, name: x}
        query, key, value = (named.pop(n) for n in ("query", "key", "value"))
        result = reference.attention(query, key, value, **named)
        lse = np.where(np.isneginf(result.lse), 0, result.lse)
        return float((result.output * d_output).sum() + (lse * d_lse).sum())

    for seed, (name, gradient) in enumerate(found.items()):
        x = np.asarray({**arrays, **options}[name], np.float64)
        step = 1e-5 * normal(30 + seed, *x.shape, dtype=np.float64)
        slope = (loss(name, x + step) - loss(name, x - step)) / 2
        np.testing.assert_allclose(
            slope, (gradient * step).sum(), 1e-5, 1e-10, err_msg=name
        )


def test_by_hand() -> None:
    query = key = np.ones((1, 1, 1))
    value = 2 * np.ones((1, 1, 1))
    result = reference.attention(query, key, value, softmax_aux=np.zeros(1))
    np.testing.assert_allclose(result.output, 2 * np.e / (1 + np.e))
    np.testing.assert_allclose(result.lse, np.log(1 + np.e))


def test_nothing_to_attend_to() -> None:
    arrays = qkv(40, **SMALL)
    arrays["value"][:] = np.nan
    result = reference.attention(*arrays.values(), mask=np.zeros((3, 4), bool))
    assert not result.output.any()
    assert np.isneginf(result.lse).all()

"""Every option alone and every two together, on every backend, with all gradients."""

from typing import Any

import jax
import numpy as np
import pytest

import eqx_attention as eqxa
from eqx_attention.functional import _problem

from .helpers import (
    BACKENDS,
    FEW_BACKENDS,
    Arrays,
    Attend,
    agree,
    call,
    flash,
    normal,
    qkv,
    want,
)

pytestmark = pytest.mark.numbers

PROB = 0.3
ARRAYS: dict[str, Arrays] = {
    "mask": {"mask": normal(10, 2, 4, 6, 9) > -0.5},
    "bias": {"bias": normal(11, 2, 4, 6, 9)},
    "softmax_aux": {"softmax_aux": normal(12, 4, 2)},
    "sink_bias": {"sink_bias": normal(13, 4, 2)},
    "query_offset": {"query_offset": np.array([2, -1])},
    "segments": {
        "q_segment_ids": np.array([[0, 0, 1, 1, 2, -1], [3, 3, 3, 1, -1, -1]]),
        "kv_segment_ids": np.array(
            [[0, 0, 0, 1, 1, 1, 1, -1, -1], [3, 3, 1, 1, 1, 0, 0, 0, -1]]
        ),
    },
    "packed": {
        "cum_seqlens_q": np.array([0, 2, 2, 5]),
        "cum_seqlens_k": np.array([0, 3, 4, 8]),
    },
    "softmax_scale": {"softmax_scale": np.float32(0.4)},
    "dropout": {"dropout_key": jax.random.key(7)},
}
STATIC: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"sliding_window": (2, 1)},
    "bottom_right": {"alignment": eqxa.Alignment.BOTTOM_RIGHT},
    "sink_tokens": {"num_sink_tokens": 2},
    "sink_bias": {"num_sink_tokens": 2},
    "soft_cap": {"logits_soft_cap": 0.8},
    "dropout": {"dropout_prob": PROB},
}
OPTIONS = tuple(sorted({**ARRAYS, **STATIC}))
# Thirteen options on the lines of a projective plane: four on each, and any two of them
# meet on one line.
PLANE = [name for name in OPTIONS if name != "sink_tokens"]
LINES = [tuple(PLANE[(i + j) % 13] for j in (0, 1, 3, 9)) for i in range(13)]
# More forms of one option, which are tried alone.
FORMS: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "nothing": ({}, {}),
    "mask over keys": ({"mask": normal(10, 2, 1, 1, 9) > -0.5}, {}),
    "mask over queries and keys": ({"mask": normal(10, 6, 9) > -0.5}, {}),
    "mask of kv_heads": ({"mask": normal(10, 2, 2, 6, 9) > -0.5}, {}),
    "mask of integers": ({"mask": np.arange(54).reshape(6, 9) % 3}, {}),
    "bias over keys": ({"bias": normal(11, 2, 1, 1, 9)}, {}),
    "bias over queries": ({"bias": normal(11, 1, 4, 6, 1)}, {}),
    "bias of heads": ({"bias": normal(11, 4, 1, 1)}, {}),
    "bias of kv_heads": ({"bias": normal(11, 2, 6, 9)}, {}),
    "bias over queries and keys": ({"bias": normal(11, 6, 9)}, {}),
    "bias, a number": ({"bias": np.float32(0.3)}, {}),
    "softmax_aux for all heads": ({"softmax_aux": normal(12, 3)}, {}),
    "sink_bias for all heads": (
        {"sink_bias": normal(13, 2)},
        {"num_sink_tokens": 2, "sliding_window": (1, 0)},
    ),
    "window, an int": ({}, {"sliding_window": 2}),
    "window without left": ({}, {"sliding_window": (None, 1)}),
    "window without right": ({}, {"sliding_window": (1, None)}),
    "window of nothing": ({}, {"sliding_window": (None, None)}),
    "window of itself": ({}, {"sliding_window": 0}),
    "query_offset, an int": ({}, {"query_offset": 3, "causal": True}),
    "query_offset, an array": ({"query_offset": np.array(3)}, {"causal": True}),
    "softmax_scale, a float": ({}, {"softmax_scale": 0.4}),
    "softmax_scale of zero": ({}, {"softmax_scale": 0.0}),
    "softmax_scale below zero": ({}, {"softmax_scale": -0.7}),
    "causal from bottom right": (
        {},
        {"causal": True, "alignment": eqxa.Alignment.BOTTOM_RIGHT},
    ),
}


def gather(*names: str) -> tuple[Arrays, dict[str, Any]]:
    arrays, options = qkv(), {}
    for name in names:
        arrays |= ARRAYS.get(name, {})
        options |= STATIC.get(name, {})
    return arrays, options


def kept() -> np.ndarray:
    """The pattern of dropout: without scores, the weights of one-hot values show it."""
    arrays = dict(
        qkv(),
        query=np.zeros((2, 6, 4, 3), np.float32),
        value=np.broadcast_to(np.eye(9, dtype=np.float32)[:, None], (2, 9, 2, 9)),
        dropout_key=jax.random.key(7),
    )
    output = call(eqxa.standard_attention, arrays, dropout_prob=PROB).output
    return output.transpose(0, 2, 1, 3) > 0


@pytest.fixture(scope="module")
def keep() -> np.ndarray:
    return kept()


def compare(
    attend: Attend, arrays: Arrays, options: dict[str, Any], keep: np.ndarray
) -> None:
    pattern = {"keep": keep} if "dropout_key" in arrays else {}
    agree(call(attend, arrays, **options), want(arrays, **options, **pattern))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_forms(backend: str, form: str, keep: np.ndarray) -> None:
    arrays, options = FORMS[form]
    compare(BACKENDS[backend], qkv() | arrays, options, keep)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_alone(backend: str, option: str, keep: np.ndarray) -> None:
    compare(BACKENDS[backend], *gather(option), keep)


@pytest.mark.parametrize("line", LINES, ids="-".join)
@pytest.mark.parametrize("backend", ("standard", "flash-4x4"))
def test_pairs(backend: str, line: tuple[str, ...], keep: np.ndarray) -> None:
    """Compiling takes the time: four options at once, and every pair among them."""
    both = {"packed", "segments"}
    for left_out in sorted(both) if both <= set(line) else [""]:
        names = [name for name in line if name != left_out]
        compare(BACKENDS[backend], *gather(*names), keep)


@pytest.mark.parametrize("either", ("packed", "segments"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_at_once(backend: str, either: str, keep: np.ndarray) -> None:
    others = (name for name in OPTIONS if name not in ("packed", "segments"))
    compare(BACKENDS[backend], *gather(*others, either), keep)


@pytest.mark.parametrize("form", ("nothing", "bias of heads", "mask of kv_heads"))
@pytest.mark.parametrize("either", ("packed", "segments"))
def test_one_head_at_a_time(
    monkeypatch: pytest.MonkeyPatch, either: str, form: str, keep: np.ndarray
) -> None:
    """What would not stay in a CPU's caches is taken by heads and batch elements.

    These chunks are no other test's, so nothing compiled before is used.
    """
    monkeypatch.setattr(_problem, "tile_capacity", lambda: 1)
    others = (name for name in OPTIONS if name not in ("packed", "segments"))
    arrays, options = gather(*others, either)
    compare(flash(3, 4), arrays | FORMS[form][0], options, keep)

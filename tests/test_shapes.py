"""Batch axes, head counts, widths and lengths of every size, 0 and 1 among them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import BACKENDS, FEW_BACKENDS, call, check, flash, normal, qkv

pytestmark = pytest.mark.numbers

SHAPES: dict[str, dict[str, Any]] = {
    "unbatched": {"batch": ()},
    "two batch axes": {"batch": (2, 3)},
    "one of each": {
        "batch": (1,),
        "q_len": 1,
        "kv_len": 1,
        "q_heads": 1,
        "kv_heads": 1,
    },
    "multi-query": {"kv_heads": 1},
    "multi-head": {"kv_heads": 4},
    "groups of three": {"q_heads": 6, "kv_heads": 2},
    "wide values": {"qk_dim": 4, "v_dim": 7},
    "narrow values": {"qk_dim": 7, "v_dim": 1},
    "width of one": {"qk_dim": 1, "v_dim": 1},
    "many widths": {"qk_dim": 72, "v_dim": 24},
    "no batch": {"batch": (0,)},
    "no batch in two axes": {"batch": (2, 0)},
    "no query": {"q_len": 0},
    "no key": {"kv_len": 0},
    "no query and no key": {"q_len": 0, "kv_len": 0},
    "values without width": {"v_dim": 0},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_shapes(backend: str, name: str) -> None:
    check(BACKENDS[backend], qkv(**SHAPES[name]), causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_but_sinks(backend: str) -> None:
    arrays = qkv(kv_len=0) | {"softmax_aux": normal(3, 4, 2)}
    check(BACKENDS[backend], arrays)


@pytest.mark.parametrize(
    "lengths",
    ((1, 9), (9, 1), (4, 4), (5, 3), (3, 5), (8, 8), (7, 12), (12, 7)),
    ids=lambda pair: f"{pair[0]}x{pair[1]}",
)
def test_lengths_around_the_chunk(lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    check(flash(4, 4), qkv(q_len=q_len, kv_len=kv_len), sliding_window=(3, 1))


def test_chunks_far_longer_than_the_lengths() -> None:
    check(flash(4096, 4096), qkv(), causal=True)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_two_batch_axes_with_everything(backend: str) -> None:
    rng = np.random.default_rng(0)
    arrays = qkv(batch=(2, 3)) | {
        "mask": normal(3, 2, 1, 1, 6, 9) > -0.8,
        "bias": normal(4, 3, 4, 1, 9),
        "query_offset": np.array([[3, 0, 1], [-1, 2, 4]]),
        "q_segment_ids": rng.integers(-1, 2, (2, 3, 6)),
        "kv_segment_ids": rng.integers(-1, 2, (2, 3, 9)),
    }
    check(BACKENDS[backend], arrays, causal=True)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_arguments_of_a_smaller_batch(backend: str) -> None:
    """Offsets and segments broadcast over the batch where their axis is 1."""
    arrays = qkv() | {
        "query_offset": np.array([3]),
        "q_segment_ids": np.array([[0, 0, 0, 1, 1, 1]]),
        "kv_segment_ids": np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1]]),
    }
    check(BACKENDS[backend], arrays, causal=True)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_one_mask_in_four_shapes(backend: str) -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}
    mask = jnp.asarray(normal(3, 9) > -0.5)
    attend = BACKENDS[backend]
    expected = attend(**arrays, mask=mask)
    for shape in ((1, 9), (6, 9), (1, 1, 1, 9), (2, 4, 6, 9), (1, 2, 6, 9)):
        found = attend(**arrays, mask=jnp.broadcast_to(mask, shape))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_comes_back(backend: str) -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv(batch=(2, 3)).items()}
    attend = BACKENDS[backend]
    output = jax.eval_shape(lambda arrays: attend(**arrays), arrays)
    assert output.shape == (2, 3, 6, 4, 5)
    output, lse = jax.eval_shape(
        lambda arrays: attend(**arrays, return_lse=True), arrays
    )
    assert output.shape == (2, 3, 6, 4, 5)
    assert lse.shape == (2, 3, 4, 6)


def test_no_key_means_nothing() -> None:
    for backend in FEW_BACKENDS.values():
        found = call(backend, qkv(kv_len=0))
        assert not found.output.any()
        assert np.isneginf(found.lse).all()

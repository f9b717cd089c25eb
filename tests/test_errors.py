"""What cannot be done is said at once, by name, and never ignored."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attention as eqxa

from .helpers import BACKENDS, FEW_BACKENDS, Arrays, normal, qkv


def arrays(**shape: Any) -> Arrays:
    return {n: jnp.asarray(x) for n, x in qkv(**shape).items()}


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


# What is put in place of, or beside, good arguments; and the name the error must say.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "heads do not divide": ({"query": zeros(2, 6, 3, 3)}, "heads"),
    "fewer query heads": ({"query": zeros(2, 6, 1, 3)}, "heads"),
    "no kv_heads": ({"key": zeros(2, 9, 0, 3), "value": zeros(2, 9, 0, 5)}, "heads"),
    "value's heads": ({"value": zeros(2, 9, 4, 5)}, "value"),
    "value's length": ({"value": zeros(2, 8, 2, 5)}, "value"),
    "key's width": ({"key": zeros(2, 9, 2, 4)}, "key"),
    "key's batch": ({"key": zeros(3, 9, 2, 3)}, "key"),
    "key's batch of one": ({"key": zeros(1, 9, 2, 3)}, "key"),
    "key's rank": ({"key": zeros(9, 2, 3)}, "key"),
    "query's rank": ({"query": zeros(4, 3)}, "query"),
    "query of integers": ({"query": zeros(2, 6, 4, 3, dtype=jnp.int32)}, "query"),
    "value of booleans": ({"value": zeros(2, 9, 2, 5, dtype=bool)}, "value"),
    "query of complex numbers": (
        {"query": zeros(2, 6, 4, 3, dtype=jnp.complex64)},
        "query",
    ),
    "key is no array": ({"key": [1.0]}, "key"),
    "mask of floats": ({"mask": zeros(6, 9)}, "mask"),
    "mask's keys": ({"mask": zeros(6, 8, dtype=bool)}, "mask"),
    "mask's queries": ({"mask": zeros(5, 9, dtype=bool)}, "mask"),
    "mask's heads": ({"mask": zeros(3, 6, 9, dtype=bool)}, "mask"),
    "mask's batch": ({"mask": zeros(3, 1, 6, 9, dtype=bool)}, "mask"),
    "mask's rank": ({"mask": zeros(1, 2, 1, 6, 9, dtype=bool)}, "mask"),
    "bias of integers": ({"bias": zeros(6, 9, dtype=jnp.int32)}, "bias"),
    "bias of booleans": ({"bias": zeros(6, 9, dtype=bool)}, "bias"),
    "bias's keys": ({"bias": zeros(6, 8)}, "bias"),
    "bias's heads": ({"bias": zeros(3, 6, 9)}, "bias"),
    "softmax_aux's heads": ({"softmax_aux": zeros(2, 1)}, "softmax_aux"),
    "softmax_aux's rank": ({"softmax_aux": zeros(1, 4, 1)}, "softmax_aux"),
    "softmax_aux, a number": ({"softmax_aux": zeros()}, "softmax_aux"),
    "softmax_aux of integers": (
        {"softmax_aux": zeros(4, 1, dtype=jnp.int32)},
        "softmax_aux",
    ),
    "sink_bias without tokens": ({"sink_bias": zeros(4, 1)}, "sink_bias"),
    "sink_bias's tokens": (
        {"sink_bias": zeros(4, 3), "num_sink_tokens": 2},
        "sink_bias",
    ),
    "sink_bias's heads": (
        {"sink_bias": zeros(2, 2), "num_sink_tokens": 2},
        "sink_bias",
    ),
    "num_sink_tokens below zero": ({"num_sink_tokens": -1}, "num_sink_tokens"),
    "num_sink_tokens, a float": ({"num_sink_tokens": 1.5}, "num_sink_tokens"),
    "causal, an int": ({"causal": 1}, "causal"),
    "window below zero": ({"sliding_window": -1}, "sliding_window"),
    "window's left below zero": ({"sliding_window": (-1, 0)}, "sliding_window"),
    "window of three": ({"sliding_window": (1, 1, 1)}, "sliding_window"),
    "window of floats": ({"sliding_window": (1.0, 0)}, "sliding_window"),
    "window of a bool": ({"sliding_window": True}, "sliding_window"),
    "alignment, a string": ({"alignment": "top_left"}, "alignment"),
    "query_offset's batch": ({"query_offset": jnp.zeros(3, jnp.int32)}, "query_offset"),
    "query_offset of floats": ({"query_offset": jnp.zeros(2)}, "query_offset"),
    "query_offset, a float": ({"query_offset": 1.0}, "query_offset"),
    "q_segment_ids alone": (
        {"q_segment_ids": zeros(2, 6, dtype=jnp.int32)},
        "kv_segment_ids",
    ),
    "kv_segment_ids alone": (
        {"kv_segment_ids": zeros(2, 9, dtype=jnp.int32)},
        "q_segment_ids",
    ),
    "q_segment_ids of floats": (
        {"q_segment_ids": zeros(2, 6), "kv_segment_ids": zeros(2, 9, dtype=jnp.int32)},
        "q_segment_ids",
    ),
    "kv_segment_ids's length": (
        {
            "q_segment_ids": zeros(2, 6, dtype=jnp.int32),
            "kv_segment_ids": zeros(2, 6, dtype=jnp.int32),
        },
        "kv_segment_ids",
    ),
    "cum_seqlens_q alone": (
        {"cum_seqlens_q": jnp.asarray([0, 6])},
        "cum_seqlens_k",
    ),
    "cum_seqlens of two lengths": (
        {"cum_seqlens_q": jnp.asarray([0, 6]), "cum_seqlens_k": jnp.asarray([0, 3, 9])},
        "cum_seqlens",
    ),
    "cum_seqlens of nothing": (
        {
            "cum_seqlens_q": zeros(0, dtype=jnp.int32),
            "cum_seqlens_k": zeros(0, dtype=jnp.int32),
        },
        "cum_seqlens",
    ),
    "cum_seqlens's rank": (
        {
            "cum_seqlens_q": zeros(2, 2, dtype=jnp.int32),
            "cum_seqlens_k": zeros(2, 2, dtype=jnp.int32),
        },
        "cum_seqlens",
    ),
    "cum_seqlens of floats": (
        {"cum_seqlens_q": zeros(2), "cum_seqlens_k": zeros(2)},
        "cum_seqlens",
    ),
    "cum_seqlens and segments": (
        {
            "cum_seqlens_q": jnp.asarray([0, 6]),
            "cum_seqlens_k": jnp.asarray([0, 9]),
            "q_segment_ids": zeros(2, 6, dtype=jnp.int32),
            "kv_segment_ids": zeros(2, 9, dtype=jnp.int32),
        },
        "cum_seqlens",
    ),
    "softmax_scale's rank": ({"softmax_scale": zeros(1)}, "softmax_scale"),
    "softmax_scale, a string": ({"softmax_scale": "1"}, "softmax_scale"),
    "logits_soft_cap of zero": ({"logits_soft_cap": 0.0}, "logits_soft_cap"),
    "logits_soft_cap below zero": ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
    "dropout without a key": ({"dropout_prob": 0.5}, "dropout_key"),
    "dropout_prob above one": (
        {"dropout_prob": 1.5, "dropout_key": jax.random.key(0)},
        "dropout_prob",
    ),
    "dropout_prob below zero": (
        {"dropout_prob": -0.1, "dropout_key": jax.random.key(0)},
        "dropout_prob",
    ),
    "dropout_prob of NaN": (
        {"dropout_prob": float("nan"), "dropout_key": jax.random.key(0)},
        "dropout_prob",
    ),
    "dropout_key of floats": (
        {"dropout_prob": 0.5, "dropout_key": zeros(2)},
        "dropout_key",
    ),
    "many dropout_keys": (
        {"dropout_prob": 0.5, "dropout_key": jax.random.split(jax.random.key(0), 2)},
        "dropout_key",
    ),
    "query without key's batch": ({"query": zeros(6, 4, 3)}, "query"),
    "query of another batch": ({"query": zeros(1, 6, 4, 3)}, "query"),
    "q_segment_ids of one": (
        {
            "q_segment_ids": zeros(2, 1, dtype=jnp.int32),
            "kv_segment_ids": zeros(2, 9, dtype=jnp.int32),
        },
        "q_segment_ids",
    ),
    "softmax_scale of infinity": ({"softmax_scale": float("inf")}, "softmax_scale"),
    "softmax_scale, a bool": ({"softmax_scale": True}, "softmax_scale"),
    "query_offset, a bool": ({"query_offset": True}, "query_offset"),
    "logits_soft_cap of infinity": (
        {"logits_soft_cap": float("inf")},
        "logits_soft_cap",
    ),
    "logits_soft_cap too small": ({"logits_soft_cap": 1e-40}, "logits_soft_cap"),
    "logits_dtype of 8 bits": ({"logits_dtype": jnp.float8_e4m3fn}, "logits_dtype"),
    "num_sink_tokens too many": ({"num_sink_tokens": 2**40}, "num_sink_tokens"),
    "logits_dtype of integers": ({"logits_dtype": jnp.int32}, "logits_dtype"),
    "an unknown option": ({"window": 1}, "window"),
}


def said(error: pytest.ExceptionInfo[Exception], name: str) -> None:
    """A sentence on one line that says the name; shapes come with a table of sizes."""
    message = str(error.value)
    assert name in message
    if type(error.value) is ValueError:
        assert "\n" not in message.strip()


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("backend", (*FEW_BACKENDS, "auto"))
def test_wrong(backend: str, case: str) -> None:
    wrong, name = WRONG[case]
    with pytest.raises((ValueError, TypeError)) as error:
        BACKENDS[backend](**(arrays() | wrong))
    said(error, name)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_while_tracing(backend: str) -> None:
    """The same is said of shapes alone, before anything is computed."""
    spec = jax.ShapeDtypeStruct((2, 6, 3, 3), jnp.float32)
    rest = {n: x for n, x in arrays().items() if n != "query"}
    with pytest.raises((ValueError, TypeError)) as error:
        jax.eval_shape(lambda query: BACKENDS[backend](query, **rest), spec)
    said(error, "heads")
    assert "3" in str(error.value) and "2" in str(error.value)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_positional_options(backend: str) -> None:
    with pytest.raises(TypeError):
        BACKENDS[backend](*arrays().values(), jnp.ones((6, 9), bool))


CHUNKS: tuple[tuple[Any, Any], ...] = ((0, 4), (4, -1), (1.0, 4), (4, None), (True, 4))


@pytest.mark.parametrize("sizes", CHUNKS, ids=str)
def test_chunk_sizes(sizes: tuple[Any, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"query|key"):
        eqxa.ChunkSizes(query=sizes[0], key=sizes[1])


def test_chunk_sizes_of_another_type() -> None:
    with pytest.raises(TypeError, match="chunk_sizes"):
        eqxa.flash_attention(**arrays(), chunk_sizes=(4, 4))


def test_results_that_exclude_each_other() -> None:
    """A part has its own lse: asking for one beside it is a mistake."""
    with pytest.raises((ValueError, TypeError), match="return_lse"):
        eqxa.flash_attention(**arrays(), normalize_output=False, return_lse=True)


WRONG_DECODE: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"query": zeros(2, 3, 3)}, "heads"),
    "query's rank": ({"query": zeros(2, 1, 1, 4, 3)}, "query"),
    "key's width": ({"key": zeros(2, 9, 2, 4)}, "key"),
    "value's length": ({"value": zeros(2, 8, 2, 5)}, "value"),
    "start's batch": ({"sequence_start": zeros(3, dtype=jnp.int32)}, "sequence_start"),
    "start's rank": (
        {"sequence_start": zeros(2, 1, dtype=jnp.int32)},
        "sequence_start",
    ),
    "start of floats": ({"sequence_start": zeros(2)}, "sequence_start"),
    "end of floats": ({"sequence_end": zeros(2)}, "sequence_end"),
    "block_size of zero": ({"block_size": 0}, "block_size"),
    "block_size, a float": ({"block_size": 2.0}, "block_size"),
    "window below zero": ({"sliding_window": (-1, 0)}, "sliding_window"),
    "sink_bias without tokens": ({"sink_bias": zeros(4, 1)}, "sink_bias"),
    "softmax_aux's heads": ({"softmax_aux": zeros(3, 1)}, "softmax_aux"),
    "mask's keys": ({"mask": zeros(8, dtype=bool)}, "mask"),
    "bias of integers": ({"bias": zeros(9, dtype=jnp.int32)}, "bias"),
    "soft cap of zero": ({"logits_soft_cap": 0.0}, "logits_soft_cap"),
    "causal": ({"causal": True}, "causal"),
    "dropout": ({"dropout_prob": 0.1}, "dropout_prob"),
}


@pytest.mark.parametrize("case", WRONG_DECODE)
def test_wrong_decode(case: str) -> None:
    wrong, name = WRONG_DECODE[case]
    good = arrays() | {
        "query": zeros(2, 4, 3),
        "sequence_start": zeros(2, dtype=jnp.int32),
        "sequence_end": zeros(2, dtype=jnp.int32),
    }
    with pytest.raises((ValueError, TypeError)) as error:
        eqxa.ragged_decode_attention(**(good | wrong))
    said(error, name)


WRONG_PAGED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"query": zeros(2, 3, 3)}, "heads"),
    "pages' width": ({"key_pages": zeros(5, 4, 2, 4)}, "key_pages"),
    "pages' number": ({"value_pages": zeros(6, 4, 2, 5)}, "value_pages"),
    "pages' size": ({"value_pages": zeros(5, 3, 2, 5)}, "value_pages"),
    "pages' rank": ({"key_pages": zeros(5, 2, 3)}, "key_pages"),
    "table's batch": ({"page_table": zeros(3, 2, dtype=jnp.int32)}, "page_table"),
    "table of floats": ({"page_table": zeros(2, 2)}, "page_table"),
    "end of floats": ({"sequence_end": zeros(2)}, "sequence_end"),
    "mask's keys": ({"mask": zeros(7, dtype=bool)}, "mask"),
}


@pytest.mark.parametrize("case", WRONG_PAGED)
def test_wrong_paged(case: str) -> None:
    wrong, name = WRONG_PAGED[case]
    good = {
        "query": zeros(2, 4, 3),
        "key_pages": zeros(5, 4, 2, 3),
        "value_pages": zeros(5, 4, 2, 5),
        "page_table": zeros(2, 2, dtype=jnp.int32),
        "sequence_start": zeros(2, dtype=jnp.int32),
        "sequence_end": zeros(2, dtype=jnp.int32),
    }
    with pytest.raises((ValueError, TypeError)) as error:
        eqxa.paged_decode_attention(**(good | wrong))
    said(error, name)


def test_merge_attention() -> None:
    output, lse = jnp.zeros((2, 6, 4, 5)), jnp.zeros((2, 4, 6))
    for outputs, lses in (
        ([], []),
        ([output], [lse, lse]),
        ([output, output[:, :3]], [lse, lse]),
        ([output], [jnp.swapaxes(lse, 1, 2)]),
    ):
        with pytest.raises((ValueError, TypeError), match=r"outputs|lses"):
            eqxa.merge_attention(outputs, lses)


def test_parts_of_different_shapes() -> None:
    part = eqxa.flash_attention(**arrays(), normalize_output=False)
    other = eqxa.flash_attention(**arrays(q_len=5), normalize_output=False)
    with pytest.raises((ValueError, TypeError)):
        part.merge(other)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_good_arguments_raise_nothing(backend: str) -> None:
    """The arguments that the tests above spoil are good ones."""
    output = BACKENDS[backend](**arrays(), bias=jnp.asarray(normal(3, 6, 9)))
    assert np.isfinite(output).all()

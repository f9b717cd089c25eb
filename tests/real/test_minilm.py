"""all-MiniLM-L6-v2 gives the embeddings that it should."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attention as eqxa
from examples import minilm

Answers = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Two padded batches of ids, their embeddings and some of their hidden states."""
    with np.load(Path(__file__).parent / "data" / "minilm.npz") as file:
        return dict(file)


@pytest.mark.parametrize("batch", ["short", "long"])
@pytest.mark.parametrize("backend", [eqxa.Backend.STANDARD, eqxa.Backend.FLASH])
def test_stored_answers(backend: eqxa.Backend, batch: str, answers: Answers) -> None:
    model = minilm.load_model(backend=backend)
    ids = jnp.asarray(answers[f"{batch}_ids"])
    mask = jnp.asarray(answers[f"{batch}_mask"])
    rows, columns = answers[f"{batch}_hidden_rows"].T
    hidden = np.asarray(model.hidden_states(ids, mask))
    np.testing.assert_allclose(
        hidden[rows, columns], answers[f"{batch}_hidden"], rtol=0, atol=2e-4
    )
    np.testing.assert_allclose(
        np.asarray(model(ids, mask)), answers[f"{batch}_embeddings"], rtol=0, atol=1e-5
    )


def test_tokenizer_round_trip(answers: Answers) -> None:
    tokenizer = minilm.load_tokenizer()
    for row, mask in zip(answers["short_ids"], answers["short_mask"], strict=True):
        ids = row[mask].tolist()
        assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


def test_like_sentences_are_close() -> None:
    sentences = ("A cat sleeps.", "A kitten naps.", "Stocks fell sharply.")
    embeddings = minilm.embed(minilm.load_model(), minilm.load_tokenizer(), sentences)
    cosines = np.asarray(embeddings @ embeddings.T)
    np.testing.assert_allclose(np.diagonal(cosines), 1, rtol=0, atol=1e-6)
    assert cosines[0, 1] > 0.6 > 0.2 > cosines[0, 2]

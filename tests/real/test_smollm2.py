"""SmolLM2-135M-Instruct writes, token for token, what it should."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGUFReader
from tokenizers import Tokenizer

import eqx_attention as eqxa
from examples import smollm2

from . import slow

Answers = Mapping[str, np.ndarray]

# Hidden states reach 53, and the stored ones come of a float32 forward pass too.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Ragged prompts, the 24 tokens that follow each, hidden states; a long text."""
    with np.load(Path(__file__).parent / "data" / "smollm2.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    """The file of weights."""
    return smollm2.open_weights()


@pytest.fixture(scope="module")
def model(reader: GGUFReader) -> smollm2.SmolLM2:
    """The model, on the backend that it is there to test."""
    return smollm2.load_model(reader, backend=eqxa.Backend.FLASH)


@pytest.fixture(scope="module")
def tokenizer(reader: GGUFReader) -> Tokenizer:
    """The tokenizer in the file of weights."""
    return smollm2.load_tokenizer(reader)


def check(
    model: smollm2.SmolLM2, answers: Answers, num_prompts: int, num_tokens: int
) -> None:
    """Continues the first prompts as one batch; compares tokens and hidden states."""
    lengths = answers["lengths"][:num_prompts]
    prompts = answers["prompts"][:num_prompts, : lengths.max()]
    ids, sizes = jnp.asarray(prompts), jnp.asarray(lengths)
    states, _ = smollm2.prefill(model, ids, sizes, prompts.shape[1] + num_tokens)
    steps = list(smollm2.generate(model, ids, sizes, num_tokens))

    tokens = np.stack([np.asarray(step.tokens) for step in steps], axis=1)
    np.testing.assert_array_equal(tokens, answers["tokens"][:num_prompts, :num_tokens])

    read = np.asarray(states)
    written = np.stack([np.asarray(step.hidden) for step in steps], axis=1)
    rows, positions = answers["hidden_rows"].T
    for i, length in enumerate(lengths):
        # The first token is chosen by the prompt's last hidden state.
        sequence = np.concatenate([read[i, :length], written[i, 1:]])
        stored = (rows == i) & (positions < len(sequence))
        assert stored.sum() >= num_tokens
        np.testing.assert_allclose(
            sequence[positions[stored]],
            answers["hidden"][stored],
            rtol=0,
            atol=TOLERANCE,
        )


def test_short_ragged_batch(model: smollm2.SmolLM2, answers: Answers) -> None:
    check(model, answers, num_prompts=4, num_tokens=8)


@slow
def test_whole_ragged_batch(model: smollm2.SmolLM2, answers: Answers) -> None:
    check(model, answers, *answers["tokens"].shape)


@slow
def test_long_text(model: smollm2.SmolLM2, answers: Answers) -> None:
    ids = answers["licence_ids"]
    prompts, lengths = smollm2.pad_right([ids.tolist()])
    states, _ = smollm2.prefill(model, prompts, lengths, len(ids))
    hidden = np.asarray(states[0])
    np.testing.assert_allclose(
        hidden[answers["licence_rows"]],
        answers["licence_hidden"],
        rtol=0,
        atol=TOLERANCE,
    )
    logprobs: list[np.ndarray] = []
    for start in range(0, len(ids) - 1, 256):
        rows = hidden[:-1][start : start + 256]
        logits = jax.nn.log_softmax(model.logits(jnp.asarray(rows)))
        following = ids[1:][start : start + 256, None]
        logprobs.append(np.take_along_axis(np.asarray(logits), following, 1)[:, 0])
    np.testing.assert_allclose(
        np.concatenate(logprobs), answers["licence_logprobs"], rtol=0, atol=TOLERANCE
    )


def test_tokenizer_round_trip(tokenizer: Tokenizer, answers: Answers) -> None:
    for prompt, length in zip(answers["prompts"], answers["lengths"], strict=True):
        ids = prompt[:length].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert tokenizer.encode(text).ids == ids
    text = "Zoë paid €1234.50\n\tfor 3 naïve 🙂s — didn't she?"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat(tokenizer: Tokenizer, answers: Answers) -> None:
    ids = answers["prompts"][1, : answers["lengths"][1]].tolist()
    question = "Explain gravity to a child in two sentences."
    assert tokenizer.encode(smollm2.chat(question)).ids == ids

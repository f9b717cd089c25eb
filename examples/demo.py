"""Two real models on one attention: SmolLM2 answers, then MiniLM compares sentences.

    python examples/demo.py "Why is the sky blue?" "Name three colours."

The questions are answered together, as one ragged batch.
"""

import argparse
import itertools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import minilm
import numpy as np
import smollm2
from tqdm import tqdm

import eqx_attention as eqxa

QUESTIONS = (
    "What is the capital of France?",
    "Explain gravity to a child in two sentences.",
)
SENTENCES = (
    "The cat sat on the mat.",
    "A feline rested upon the rug.",
    "The central bank raised interest rates by half a point.",
    "Borrowing money has become more expensive.",
)


def print_backend(model: smollm2.SmolLM2, length: int) -> None:
    """Prints which backend reads the prompts, and why."""
    config, backend = model.config, model.blocks.attention.backend
    query, key = (
        jax.ShapeDtypeStruct((length, num_heads, config.head_dim), jnp.float32)
        for num_heads in (config.num_heads, config.num_kv_heads)
    )
    chosen = eqxa.resolve(query, key, key, backend=backend)
    print(f"prefill: {chosen.backend.name} ({chosen.reason})")


def answer(questions: Sequence[str], num_tokens: int) -> None:
    """Answers all questions at once, and prints how fast that went."""
    print("SmolLM2-135M-Instruct")
    reader = smollm2.open_weights()
    model, tokenizer = smollm2.load_model(reader), smollm2.load_tokenizer(reader)
    prompts, lengths = smollm2.pad_right(
        [tokenizer.encode(smollm2.chat(question)).ids for question in questions]
    )
    capacity = prompts.shape[1] + num_tokens
    print_backend(model, prompts.shape[1])

    def prefill_seconds() -> float:
        start = time.perf_counter()
        hidden, _ = smollm2.prefill(model, prompts, lengths, capacity)
        hidden.block_until_ready()
        return time.perf_counter() - start

    prefill_seconds()  # compiles it
    read, reading_seconds = int(lengths.sum()), prefill_seconds()

    end = tokenizer.token_to_id(smollm2.END_OF_TURN)
    steps = smollm2.generate(model, prompts, lengths, num_tokens)
    written: list[np.ndarray] = []
    times: list[float] = []
    for step in tqdm(steps, total=num_tokens, unit="step", desc="writing"):
        written.append(np.asarray(step.tokens))
        times.append(time.perf_counter())
        if np.any(np.stack(written) == end, axis=0).all():
            break
    for question, ids in zip(questions, np.stack(written, axis=1), strict=True):
        # A sequence that has ended goes on until all have: what follows is dropped.
        ended = itertools.takewhile(lambda token: token != end, ids.tolist())
        print(f"\n> {question}\n{tokenizer.decode(list(ended)).strip()}")

    print(f"\nprefill: {read / reading_seconds:.0f} tokens/s ({read} tokens)")
    # Steps 0 and 1 wait for the compiler.
    if (timed := len(times) - 2) > 0:
        seconds = (times[-1] - times[1]) / timed
        print(
            f"decode:  {len(questions) / seconds:.0f} tokens/s"
            f" ({1e3 * seconds:.0f} ms a step of {len(questions)} sequences)"
        )


def compare(sentences: Sequence[str]) -> None:
    """Prints the cosine similarity of each sentence to those before it."""
    print("\nall-MiniLM-L6-v2, cosine similarities")
    model, tokenizer = minilm.load_model(), minilm.load_tokenizer()
    embeddings = minilm.embed(model, tokenizer, sentences)
    cosines = np.asarray(embeddings @ embeddings.T)
    for i, sentence in enumerate(sentences):
        row = " ".join(f"{cosine:5.2f}" for cosine in cosines[i, : i + 1])
        print(f"{row:<{6 * len(sentences)}} {sentence}")


def main() -> None:
    """Reads the command line, and runs both models."""
    parser = argparse.ArgumentParser(description="Runs two real models.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--tokens", type=int, default=48, help="most to write")
    arguments = parser.parse_args()
    answer(arguments.questions, arguments.tokens)
    compare(SENTENCES)


if __name__ == "__main__":
    main()

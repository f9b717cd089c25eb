"""Trains a language model of bytes on Python's own documentation, on a CPU.

    python examples/train.py

The text is `pydoc_data.topics` of the standard library. Its documents are packed into
rows of 2048 bytes, and none sees another. Attention is computed in bfloat16 and with
dropout. A run with flash attention is begun again with standard attention, which drops
the same weights, so that the losses are the same but for rounding. Then the model
writes, byte by byte, through caches.
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tqdm import tqdm

import eqx_attention as eqxa

SIZE, NUM_HEADS, DROPOUT = 128, 2, 0.1
# How far each layer sees. What is near is most of what a small model can learn, and a
# narrow window costs little.
WINDOWS = ((15, 0), (63, 0), None)
LENGTH = 2048
BEGIN = 0  # A byte that is not in the text: each document begins with it.
PLOT = Path(__file__).parent.parent / "docs" / "training.png"


class Rows(NamedTuple):
    """Documents, one after the other, cut into rows."""

    tokens: Int[Array, "rows length"]
    documents: Int[Array, "rows length"]  # Which document each byte is of.


def load_rows() -> tuple[Rows, Rows]:
    """The text to learn from, and the last tenth of the rows to be tested on."""
    order = np.random.default_rng(0).permutation(sorted(topics))
    texts = [np.frombuffer(topics[name].encode(), np.uint8) for name in order]
    texts = [np.concatenate(([BEGIN], text)) for text in texts]
    tokens = np.concatenate(texts).astype(np.int32)
    documents = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    num_rows = len(tokens) // LENGTH
    rows = [
        jnp.asarray(x[: num_rows * LENGTH].reshape(num_rows, LENGTH), jnp.int32)
        for x in (tokens, documents)
    ]
    split = num_rows - num_rows // 10
    return Rows(*(x[:split] for x in rows)), Rows(*(x[split:] for x in rows))


class Block(eqx.Module):
    """Attention and an MLP, each added to its input."""

    attention: eqxa.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.RMSNorm]
    dropout: eqx.nn.Dropout

    def __init__(
        self,
        window: tuple[int, int] | None,
        backend: eqxa.Backend,
        *,
        key: PRNGKeyArray,
    ) -> None:
        """Draws the parameters."""
        keys = jax.random.split(key)
        self.attention = eqxa.MultiheadAttention(
            NUM_HEADS,
            SIZE,
            dropout_p=DROPOUT,
            causal=True,
            sliding_window=window,
            rotary=eqxa.RotaryEmbedding(SIZE // NUM_HEADS),
            qk_norm=eqx.nn.RMSNorm,
            compute_dtype=jnp.bfloat16,
            backend=backend,
            key=keys[0],
        )
        self.mlp = eqx.nn.MLP(SIZE, SIZE, 4 * SIZE, 1, jax.nn.gelu, key=keys[1])
        self.norms = [eqx.nn.RMSNorm(SIZE) for _ in range(2)]
        self.dropout = eqx.nn.Dropout(DROPOUT)

    def __call__(
        self,
        x: Float[Array, "length size"],
        documents: Int[Array, " length"] | None = None,
        *,
        cache: eqxa.KVCache | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "length size"], eqxa.KVCache | None]:
        """A whole row at once, or the next bytes after those in a cache."""
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        h = jax.vmap(self.norms[0])(x)
        if cache is None:
            h = self.attention(h, h, h, q_segment_ids=documents, key=keys[0])
        else:
            h, cache = self.attention(h, h, h, cache=cache)
        x = x + self.dropout(h, key=keys[1])
        h = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return x + self.dropout(h, key=keys[2]), cache


class ByteModel(eqx.Module):
    """From bytes to the logits of the bytes that follow."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    to_logits: eqx.nn.Linear

    def __init__(self, backend: eqxa.Backend, *, key: PRNGKeyArray) -> None:
        """Draws the parameters."""
        keys = jax.random.split(key, len(WINDOWS) + 2)
        self.embedding = eqx.nn.Embedding(256, SIZE, key=keys[0])
        self.blocks = [
            Block(window, backend, key=key)
            for window, key in zip(WINDOWS, keys[2:], strict=True)
        ]
        self.norm = eqx.nn.RMSNorm(SIZE)
        self.to_logits = eqx.nn.Linear(SIZE, 256, use_bias=False, key=keys[1])

    def __call__(
        self,
        tokens: Int[Array, " length"],
        documents: Int[Array, " length"] | None = None,
        *,
        caches: list[eqxa.KVCache] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "length 256"], list[eqxa.KVCache | None]]:
        """The logits, and the new caches, if any."""
        before = [None] * len(WINDOWS) if caches is None else caches
        after: list[eqxa.KVCache | None] = []
        x = jax.vmap(self.embedding)(tokens)
        for i, (block, cache) in enumerate(zip(self.blocks, before, strict=True)):
            block_key = None if key is None else jax.random.fold_in(key, i)
            x, cache = block(x, documents, cache=cache, key=block_key)
            after.append(cache)
        return jax.vmap(self.to_logits)(jax.vmap(self.norm)(x)), after

    def bits(self, rows: Rows, key: PRNGKeyArray | None = None) -> Float[Array, ""]:
        """The mean bits of a byte, where it and the one before are of one document."""

        def row(tokens: Array, documents: Array, key: Array | None) -> Array:
            logits, _ = self(tokens, documents, key=key)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits[:-1], tokens[1:]
            )

        keys = None if key is None else jax.random.split(key, len(rows.tokens))
        nats = jax.vmap(row, in_axes=(0, 0, None if key is None else 0))(*rows, keys)
        follows = rows.documents[:, 1:] == rows.documents[:, :-1]
        return jnp.mean(nats, where=follows) / jnp.log(2)


class Run(NamedTuple):
    """What came of a run."""

    model: ByteModel
    losses: list[float]
    seconds: float
    megabytes: float  # Beside the parameters and the text.

    def __str__(self) -> str:
        milliseconds = 1e3 * self.seconds / len(self.losses)
        return f"{milliseconds:.0f} ms a step, {self.megabytes:.0f} MiB"


def train(rows: Rows, backend: eqxa.Backend, num_steps: int, stop: int) -> Run:
    """Trains a model from the start; of `num_steps`, the first `stop` are made."""
    model = ByteModel(backend, key=jax.random.key(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 20, num_steps)
    optimiser = optax.adamw(schedule, b2=0.98)
    state = optimiser.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate="all-except-first")
    def step(
        rows: Rows, model: ByteModel, state: optax.OptState, number: Int[Array, ""]
    ) -> tuple[ByteModel, optax.OptState, Float[Array, ""]]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
        row = jax.random.randint(keys[0], (1,), 0, len(rows.tokens))
        chosen = Rows(*(x[row] for x in rows))
        loss, grads = eqx.filter_value_and_grad(ByteModel.bits)(model, chosen, keys[1])
        updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    compiled = step.lower(rows, model, state, jnp.array(0)).compile()
    memory = compiled.compiled.memory_analysis().temp_size_in_bytes
    losses: list[float] = []
    start = time.perf_counter()
    with tqdm(range(stop), desc=backend.name.lower(), unit="step") as progress:
        for number in progress:
            model, state, loss = compiled(rows, model, state, jnp.array(number))
            losses.append(float(loss))
            progress.set_postfix(bits=f"{np.mean(losses[-20:]):.2f}")
    return Run(model, losses, time.perf_counter() - start, memory / 2**20)


@eqx.filter_jit
def write(
    model: ByteModel, prompt: Int[Array, " length"], num_bytes: int, key: PRNGKeyArray
) -> Int[Array, " num_bytes"]:
    """Bytes that may follow a prompt, drawn one by one."""
    capacity = len(prompt) + num_bytes
    caches = [
        block.attention.init_cache(1, capacity, dtype=jnp.bfloat16)
        for block in model.blocks
    ]
    logits, caches = model(prompt, caches=caches)

    def step(carry: tuple[Array, list[eqxa.KVCache]], key: Array):
        logits, caches = carry
        token = jax.random.categorical(key, logits / 0.7)
        logits, caches = model(token[None], caches=caches)
        return (logits[0], caches), token

    start = logits[-1], caches
    return jax.lax.scan(step, start, jax.random.split(key, num_bytes))[1]


def plot(runs: dict[str, Run]) -> None:
    """Draws the losses of all runs."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, run), style in zip(runs.items(), ("-", ":"), strict=False):
        axes.plot(run.losses, style, label=f"{name}: {run}")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(1.5, 8))
    axes.legend()
    figure.savefig(PLOT, dpi=150)
    print(f"the curves are in {PLOT}")


def main() -> None:
    """Reads the command line, trains twice, and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--compared", type=int, default=40, help="by both backends")
    steps = parser.parse_args().steps
    compared = min(parser.parse_args().compared, steps)
    rows, held_out = load_rows()
    print(f"{rows.tokens.size} bytes to learn from, {held_out.tokens.size} to test on")
    runs = {
        name: train(rows, eqxa.Backend(name), steps, stop)
        for name, stop in (("flash", steps), ("standard", compared))
    }
    for name, run in runs.items():
        print(f"{name}: {run}, {run.seconds:.0f} s in all")
    losses = [run.losses[:compared] for run in runs.values()]
    apart = np.abs(np.subtract(*losses)).max()
    print(
        f"the losses of the first {compared} steps are {apart:.4f} bits apart at most"
    )
    model = eqx.nn.inference_mode(runs["flash"].model)
    bits = float(eqx.filter_jit(ByteModel.bits)(model, held_out))
    print(f"{bits:.2f} bits for a byte of text that the model has not seen")
    plot(runs)
    prompt = jnp.array([BEGIN, *b'The "for" statement\n'])
    written = write(model, prompt, 400, jax.random.key(2))
    print(bytes(prompt[1:].tolist() + written.tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()

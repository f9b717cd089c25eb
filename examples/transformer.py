"""A transformer's block, encoder and decoder, short enough to copy.

    python examples/transformer.py

trains them to sort the letters of words, of any lengths in one padded batch, and then
writes through caches, letter by letter. It needs optax. All is of one sequence:
`jax.vmap` makes a batch of it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from tqdm import trange

import eqx_attention as eqxa

Hidden = Float[Array, "length size"]
Tokens = Int[Array, " length"]
Cache = eqxa.KVCache


class Block(eqx.Module):
    """Self-attention, cross-attention to a context if there is one, and an MLP."""

    attention: eqxa.MultiheadAttention
    cross: eqxa.MultiheadAttention | None
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]
    dropout: eqx.nn.Dropout

    def __init__(
        self,
        size: int,
        num_heads: int,
        *,
        causal: bool = False,
        cross: bool = False,
        dropout_p: float = 0.0,
        key: PRNGKeyArray,
    ) -> None:
        """Draws the parameters."""
        keys = jax.random.split(key, 3)
        self.attention = eqxa.MultiheadAttention(
            num_heads,
            size,
            dropout_p=dropout_p,
            causal=causal,
            rotary=eqxa.RotaryEmbedding(size // num_heads),
            key=keys[0],
        )
        self.cross = None
        if cross:
            self.cross = eqxa.MultiheadAttention(
                num_heads, size, dropout_p=dropout_p, key=keys[1]
            )
        self.mlp = eqx.nn.MLP(size, size, 4 * size, 1, jax.nn.gelu, key=keys[2])
        self.norms = [eqx.nn.LayerNorm(size) for _ in range(3)]
        self.dropout = eqx.nn.Dropout(dropout_p)

    def __call__(
        self,
        x: Hidden,
        mask: Bool[Array, "..."] | None = None,
        *,
        context: eqxa.ProjectedKV | None = None,
        context_mask: Bool[Array, "..."] | None = None,
        cache: Cache | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Hidden, Cache | None]:
        """Each part is added to what it looks at. The cache has the tokens before."""
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        h = jax.vmap(self.norms[0])(x)
        if cache is None:
            h = self.attention(h, h, h, mask, key=keys[0])
        else:
            h, cache = self.attention(h, h, h, cache=cache)
        x = x + h
        if self.cross is not None and context is not None:
            h = jax.vmap(self.norms[1])(x)
            x = x + self.cross(h, context, mask=context_mask, key=keys[1])
        h = jax.vmap(self.mlp)(jax.vmap(self.norms[2])(x))
        return x + self.dropout(h, key=keys[2]), cache


class Encoder(eqx.Module):
    """Tokens that all see each other."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(
        self,
        vocabulary: int,
        size: int,
        num_heads: int,
        num_layers: int,
        *,
        key: PRNGKeyArray,
    ) -> None:
        """Draws the parameters."""
        keys = jax.random.split(key, num_layers + 1)
        self.embedding = eqx.nn.Embedding(vocabulary, size, key=keys[0])
        self.blocks = [Block(size, num_heads, key=k) for k in keys[1:]]
        self.norm = eqx.nn.LayerNorm(size)

    def __call__(self, tokens: Tokens, real: Bool[Array, " length"]) -> Hidden:
        """What each token has become; nobody sees one that is not `real`."""
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x, _ = block(x, real[None])
        return jax.vmap(self.norm)(x)


class Decoder(eqx.Module):
    """Tokens that see those before them, and all that was encoded."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(
        self,
        vocabulary: int,
        size: int,
        num_heads: int,
        num_layers: int,
        *,
        key: PRNGKeyArray,
    ) -> None:
        """Draws the parameters."""
        keys = jax.random.split(key, num_layers + 1)
        self.embedding = eqx.nn.Embedding(vocabulary, size, key=keys[0])
        self.blocks = [
            Block(size, num_heads, causal=True, cross=True, key=k) for k in keys[1:]
        ]
        self.norm = eqx.nn.LayerNorm(size)

    def contexts(self, encoded: Hidden) -> list[eqxa.ProjectedKV]:
        """What each block looks at: made once, for all tokens that are written."""
        crosses = [b.cross for b in self.blocks if b.cross is not None]
        return [cross.project_kv(encoded, encoded) for cross in crosses]

    def caches(self, capacity: int) -> list[Cache]:
        """Empty ones of one sequence."""
        return [block.attention.init_cache(1, capacity) for block in self.blocks]

    def __call__(
        self,
        tokens: Tokens,
        contexts: list[eqxa.ProjectedKV],
        real: Bool[Array, " context_length"],
        caches: list[Cache] | None = None,
    ) -> tuple[Float[Array, "length vocabulary"], list[Cache | None]]:
        """The logits of the next token at each place, and the caches, if any."""
        x = jax.vmap(self.embedding)(tokens)
        before = [None] * len(self.blocks) if caches is None else caches
        after: list[Cache | None] = []
        for block, context, cache in zip(self.blocks, contexts, before, strict=True):
            x, cache = block(x, context=context, context_mask=real[None], cache=cache)
            after.append(cache)
        return jax.vmap(self.norm)(x) @ self.embedding.weight.T, after


LETTERS, END, MAX_LENGTH = 26, 26, 8
STEPS = 800


class Sorter(eqx.Module):
    """Writes the letters of a word in order."""

    encoder: Encoder
    decoder: Decoder

    def __init__(self, *, key: PRNGKeyArray) -> None:
        """Draws the parameters."""
        keys = jax.random.split(key)
        self.encoder = Encoder(LETTERS + 1, 64, 4, 2, key=keys[0])
        self.decoder = Decoder(LETTERS + 1, 64, 4, 2, key=keys[1])

    def loss(self, word: Tokens, length: Int[Array, ""]) -> Float[Array, ""]:
        """Nats a letter; the word is padded with END, and begins with it as well."""
        real = jnp.arange(MAX_LENGTH) < length
        target = jnp.append(jnp.sort(word), END)
        given = jnp.append(jnp.array([END]), target[:-1])
        contexts = self.decoder.contexts(self.encoder(word, real))
        logits, _ = self.decoder(given, contexts, real)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        return jnp.mean(nats, where=jnp.arange(MAX_LENGTH + 1) <= length)

    def write(self, word: Tokens, length: Int[Array, ""]) -> Tokens:
        """The likeliest letters, one after the other."""
        real = jnp.arange(MAX_LENGTH) < length
        contexts = self.decoder.contexts(self.encoder(word, real))

        def step(
            carry: tuple[Int[Array, ""], list[Cache]], _: None
        ) -> tuple[tuple[Int[Array, ""], list[Cache]], Int[Array, ""]]:
            token, caches = carry
            logits, caches = self.decoder(token[None], contexts, real, caches)
            token = jnp.argmax(logits[0])
            return (token, caches), token

        start = jnp.array(END), self.decoder.caches(MAX_LENGTH + 1)
        return jax.lax.scan(step, start, length=MAX_LENGTH + 1)[1]


def words(key: PRNGKeyArray, count: int) -> tuple[Array, Array]:
    """Random words, padded, and their lengths."""
    keys = jax.random.split(key)
    lengths = jax.random.randint(keys[0], (count,), 1, MAX_LENGTH + 1)
    letters = jax.random.randint(keys[1], (count, MAX_LENGTH), 0, LETTERS)
    return jnp.where(jnp.arange(MAX_LENGTH) < lengths[:, None], letters, END), lengths


def text(tokens: Tokens) -> str:
    """The letters before the first END."""
    letters = "".join(chr(ord("a") + token) for token in tokens.tolist())
    return letters.partition(chr(ord("a") + END))[0]


def main() -> None:
    """Trains, and prints some words with their letters sorted."""
    model = Sorter(key=jax.random.key(0))
    optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))
    state = optimiser.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate="all")
    def train(model, state, key):
        @eqx.filter_value_and_grad
        def loss(model, *batch):
            return jnp.mean(jax.vmap(model.loss)(*batch))

        value, grads = loss(model, *words(key, 64))
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    steps = trange(STEPS)
    for step in steps:
        model, state, value = train(model, state, jax.random.key(step))
        if step % 50 == 0:
            steps.set_postfix(nats=f"{value:.3f}")
    given, lengths = words(jax.random.key(-1), 256)
    written = eqx.filter_jit(eqx.filter_vmap(model.write))(given, lengths)
    pairs = [(text(a), text(b)) for a, b in zip(given, written, strict=True)]
    for word, letters in pairs[:5]:
        print(f"{word} -> {letters}")
    right = sum("".join(sorted(word)) == letters for word, letters in pairs)
    print(f"{right} of {len(pairs)} new words are right")


if __name__ == "__main__":
    main()

"""What a score is: it changes the logits of a tile, and its arrays have gradients."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from ._mask import LogitsShape
from ._positions import Pairs
from ._tiles import Matrix, Tile, is_matrix


class AbstractScore(eqx.Module):
    """What becomes of logits before the softmax. `a >> b` is first a, then b.

    A module like any other: its arrays may be traced and have gradients, and it passes
    through `jit`, `vmap` and `scan`. One of one's own is an
    [`eqx_attention.scores.Score`][].
    """

    # Who calls `modify` calls `bind` before: after that, each array has a batch axis in
    # front, of the batch's size or 1.

    def bind(self, shape: LogitsShape) -> "AbstractScore":
        """The score for these sizes, which it has to fit."""
        del shape
        return self

    @abc.abstractmethod
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        """The new logits of a tile, of the same dtype; a `Matrix` is cut to it."""

    def allowed(self, tile: Tile) -> Bool[Array, "..."] | None:
        """False for the pairs that it forbids, by minus infinity; None if none."""
        del tile
        return None

    def __rshift__(self, other: "AbstractScore") -> "AbstractScore":
        return Chain((self, other))


class Chain(AbstractScore):
    """One score after the other; written `a >> b`."""

    scores: tuple[AbstractScore, ...]

    @override
    def bind(self, shape: LogitsShape) -> "Chain":
        """Binds each."""
        return Chain(tuple(score.bind(shape) for score in self.scores))

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        """By each, in order."""
        for score in self.scores:
            logits = score.modify(logits, pairs)
        return logits

    @override
    def allowed(self, tile: Tile) -> Bool[Array, "..."] | None:
        """What none of them forbids."""
        allowed = None
        for score in self.scores:
            own = score.allowed(tile)
            if own is not None:
                allowed = own if allowed is None else allowed & own
        return allowed

    @override
    def __repr__(self) -> str:
        return " >> ".join(repr(score) for score in self.scores)


class SinkBias(AbstractScore):
    """A bias of the keys at the first positions."""

    bias: Float[Array, "batch kv_heads group num_sink_tokens"]

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        """Adds the bias of each key's position, 0 past the sinks."""
        tile, num_sinks = pairs.tile, self.bias.shape[-1]
        bias = tile.cut_heads(self.bias[..., None])[..., 0]
        position = pairs.kv_positions.at(tile.kv_start, tile.kv_size)
        is_sink = (position >= 0) & (position < num_sinks)
        of_key = jnp.take(bias[0], jnp.clip(position, 0, num_sinks - 1), axis=-1)
        of_key = jnp.moveaxis(of_key.astype(logits.dtype), 2, 0)[:, :, :, None]
        of_key = jnp.where(is_sink[:, None, None, None], of_key, jnp.zeros_like(of_key))
        return logits + tile.arrange(of_key)


class ScoreParameters(eqx.Module):
    """What a logit is made of beside the query and the key; all of it has gradients."""

    scale: Float[Array, ""] | None
    score: AbstractScore | None

    def without_scale(self) -> "ScoreParameters":
        """The score alone."""
        return ScoreParameters(None, self.score)

    def cut(self, tile: Tile) -> "ScoreParameters":
        """The parameters of one tile."""

        def part(x: Array | Matrix) -> Array | Matrix:
            return x.cut(tile) if isinstance(x, Matrix) else x

        score: AbstractScore | None = jax.tree.map(part, self.score, is_leaf=is_matrix)
        return ScoreParameters(self.scale, score)

    def allowed(self, tile: Tile) -> Bool[Array, "..."] | None:
        """As `AbstractScore.allowed`; they are those of the tile."""
        return None if self.score is None else self.score.allowed(tile)


def chain(*scores: AbstractScore | None) -> AbstractScore | None:
    """These, in order; None does nothing."""
    given = tuple(score for score in scores if score is not None)
    if len(given) > 1:
        return Chain(given)
    return given[0] if given else None

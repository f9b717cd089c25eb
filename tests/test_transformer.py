"""The blocks in the examples: written at once, or letter by letter through caches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from examples import transformer

from .helpers import close

pytestmark = pytest.mark.numbers


def test_decoder_through_caches() -> None:
    """Token after token, against an encoded context that is projected once."""
    model = transformer.Sorter(key=jax.random.key(0))
    word, length = jnp.array([7, 4, 11, 0, 26, 26, 26, 26]), jnp.array(4)
    real = jnp.arange(8) < length
    tokens = jnp.array([26, 0, 4])

    @eqx.filter_jit
    def at_once() -> Array:
        contexts = model.decoder.contexts(model.encoder(word, real))
        return model.decoder(tokens, contexts, real)[0]

    @eqx.filter_jit
    def one_by_one() -> Array:
        contexts = model.decoder.contexts(model.encoder(word, real))

        def step(caches: list[transformer.Cache], token: Array) -> tuple[object, Array]:
            logits, caches = model.decoder(token[None], contexts, real, caches)
            return caches, logits[0]

        return jax.lax.scan(step, model.decoder.caches(3), tokens)[1]

    close("logits", one_by_one(), at_once())


def test_padding_is_not_seen() -> None:
    model = transformer.Sorter(key=jax.random.key(0))
    real = jnp.arange(8) < 4
    words = jnp.array([[7, 4, 11, 0, 26, 26, 26, 26], [7, 4, 11, 0, 1, 2, 3, 4]])
    found = eqx.filter_jit(eqx.filter_vmap(model.encoder, in_axes=(0, None)))(
        words, real
    )
    np.testing.assert_array_equal(found[0, :4], found[1, :4])
    assert np.any(found[0, 4:] != found[1, 4:])

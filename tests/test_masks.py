"""Masks: what each allows, alone, joined and by head, on every backend."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa
from eqx_attention import masks
from eqx_attention._mask_picture import chunk_kinds
from eqx_attention.masks import (
    BlockSparse,
    Causal,
    ChunkedLocal,
    Dense,
    Dilated,
    Documents,
    Padding,
    PerHead,
    PrefixLM,
    Rule,
    Segments,
    SinkTokens,
    SlidingWindow,
)

from .helpers import (
    BACKENDS,
    FEW_BACKENDS,
    Arrays,
    agree,
    call,
    flash,
    normal,
    qkv,
    want,
)

LENGTH = 12
IDS = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, -1, -1])
PATTERN = normal(20, 3, 3) > 0
BY_HEAD = normal(21, 4, 3, 3) > 0
DENSE = normal(22, LENGTH, LENGTH) > 0


class SameColour(eqx.Module):
    """A rule with a field."""

    colours: Array

    def __call__(self, batch: Array, head: Array, q: Array, kv: Array) -> Array:
        del batch, head
        return self.colours[q % 12] == self.colours[kv % 12]


def by_head_and_batch(batch: Array, head: Array, q: Array, kv: Array) -> Array:
    return (q - kv) % 3 <= (head + batch) % 3


# A mask, and the same said of the number of a query and a key, by NumPy.
Said = Callable[[Any, Any, Any, Any], Any]
MASKS: dict[str, tuple[masks.AbstractMask, Said]] = {
    "causal": (Causal(), lambda b, h, q, k: k <= q),
    "causal, offset": (
        Causal(jnp.asarray([2, -3])),
        lambda b, h, q, k: k <= q + np.array([2, -3])[b],
    ),
    "window": (SlidingWindow(3, 1), lambda b, h, q, k: (q - k <= 3) & (k - q <= 1)),
    "left window": (SlidingWindow(2, None), lambda b, h, q, k: q - k <= 2),
    "dilated": (
        Dilated((2, 1), 3),
        lambda b, h, q, k: ((q - k) % 3 == 0) & (q - k <= 6) & (k - q <= 3),
    ),
    "chunked": (ChunkedLocal(5), lambda b, h, q, k: q // 5 == k // 5),
    "prefix": (
        PrefixLM(jnp.asarray([4, 0])),
        lambda b, h, q, k: (k <= q) | (k < np.array([4, 0])[b]),
    ),
    "sinks": (SinkTokens(2), lambda b, h, q, k: (k < 2) & (q >= 0)),
    "padding": (
        Padding(jnp.asarray([7, 12])),
        lambda b, h, q, k: (k < np.array([7, 12])[b]) & (q >= 0),
    ),
    "segments": (
        Segments(jnp.asarray(IDS)),
        lambda b, h, q, k: (IDS[q] == IDS[k]) & (IDS[q] >= 0),
    ),
    "documents": (
        Documents.from_cum_seqlens(jnp.asarray([0, 3, 3, 10])),
        lambda b, h, q, k: ((q < 3) == (k < 3)) & (q < 10) & (k < 10),
    ),
    "lengths": (
        Documents.from_lengths(jnp.asarray([5, 7])),
        lambda b, h, q, k: (q < 5) == (k < 5),
    ),
    "blocks": (
        BlockSparse(jnp.asarray(PATTERN), 4),
        lambda b, h, q, k: PATTERN[q // 4, k // 4],
    ),
    "blocks by head": (
        BlockSparse(jnp.asarray(BY_HEAD), 5),
        lambda b, h, q, k: BY_HEAD[h, q // 5, k // 5],
    ),
    "dense": (Dense(jnp.asarray(DENSE)), lambda b, h, q, k: DENSE[q, k]),
    "rule": (Rule(by_head_and_batch), lambda b, h, q, k: (q - k) % 3 <= (h + b) % 3),
    "rule with a field": (
        Rule(SameColour(jnp.asarray(IDS))),
        lambda b, h, q, k: IDS[q] == IDS[k],
    ),
    "per head": (
        PerHead([Causal(), SlidingWindow(1, 1), ~Causal(), ChunkedLocal(4)]),
        lambda b, h, q, k: np.choose(
            h, [k <= q, abs(q - k) <= 1, k > q, q // 4 == k // 4]
        ),
    ),
    "joined": (
        Causal()
        & (SlidingWindow(2, None) | SinkTokens(1))
        & ~Dense(jnp.asarray(DENSE)),
        lambda b, h, q, k: (k <= q) & ((q - k <= 2) | (k < 1)) & ~DENSE[q, k],
    ),
}
SHAPE = (2, 4, LENGTH, LENGTH)


def said(name: str) -> np.ndarray:
    """What the mask of that name allows, as an array of all pairs."""
    return np.broadcast_to(MASKS[name][1](*np.indices(SHAPE)), SHAPE)


def arrays() -> dict[str, Any]:
    return qkv(q_len=LENGTH, kv_len=LENGTH)


@pytest.mark.parametrize("name", MASKS)
def test_array(name: str) -> None:
    got = masks.to_array(
        MASKS[name][0], LENGTH, LENGTH, batch=(2,), q_heads=4, kv_heads=2
    )
    np.testing.assert_array_equal(got, said(name))


@pytest.mark.numbers
@pytest.mark.parametrize("backend", ("standard", "flash-4x4", "flash-5x3"))
@pytest.mark.parametrize("name", MASKS)
def test_attention(name: str, backend: str) -> None:
    """Results and gradients, on each backend."""
    attend = {**BACKENDS, "flash-5x3": flash(5, 3)}[backend]
    got = call(attend, arrays(), mask=MASKS[name][0])
    agree(got, want({**arrays(), "mask": said(name)}))


@pytest.mark.numbers
def test_with_every_flag() -> None:
    """A mask goes together with the flags, which are masks themselves."""
    options = {"causal": True, "sliding_window": (5, 3), "num_sink_tokens": 1}
    mask = MASKS["per head"][0] & MASKS["rule"][0]
    both = said("per head") & said("rule")
    for attend in FEW_BACKENDS.values():
        got = call(attend, arrays(), mask=mask, **options)
        agree(got, want({**arrays(), "mask": both}, **options))


@pytest.mark.numbers
def test_same_as_jax_nn_with_the_dense_form() -> None:
    mask = MASKS["joined"][0]
    equal = qkv(q_len=LENGTH, kv_len=LENGTH, v_dim=3)
    given: Arrays = {n: jnp.asarray(x) for n, x in equal.items()}
    dense = masks.to_array(mask, LENGTH, LENGTH)[None]
    got = flash(4, 4)(**given, mask=mask)
    expected = jax.nn.dot_product_attention(*given.values(), mask=dense)
    seen = np.asarray(jnp.any(dense, axis=-1))[0, 0]
    np.testing.assert_allclose(got[:, seen], expected[:, seen], rtol=1e-5, atol=1e-5)


def some_mask(draw: Any, length: int, depth: int = 2) -> masks.AbstractMask:
    """Masks of any kind with any numbers, joined in any way."""
    number = st.integers(0, length)
    joint = draw(st.sampled_from(["leaf", "and", "or", "not"])) if depth else "leaf"
    if joint == "not":
        return ~some_mask(draw, length, depth - 1)
    if joint != "leaf":
        pair = (some_mask(draw, length, depth - 1) for _ in range(2))
        a, b = pair
        return a & b if joint == "and" else a | b
    leaf = draw(st.integers(0, 9))
    if leaf == 0:
        return Causal(draw(st.integers(-length, length)))
    if leaf == 1:
        return SlidingWindow(draw(number), draw(st.none() | number))
    if leaf == 2:
        return Dilated((draw(number), draw(number)), draw(st.integers(1, 4)))
    if leaf == 3:
        return ChunkedLocal(draw(st.integers(1, length)))
    if leaf == 4:
        return PrefixLM(draw(number))
    if leaf == 5:
        return SinkTokens(draw(number))
    if leaf == 6:
        return Padding(draw(number))
    ids = st.lists(st.integers(-1, 2), min_size=length, max_size=length)
    if leaf == 7:
        return Segments(jnp.asarray(draw(ids)), jnp.asarray(draw(ids)))
    if leaf == 8:
        block = draw(st.integers(1, length))
        blocks = -(-length // block)
        seed = draw(st.integers(0, 99))
        density = draw(st.sampled_from([-2.0, 0.0, 2.0]))
        return BlockSparse(jnp.asarray(normal(seed, blocks, blocks) < density), block)
    return Documents.from_cum_seqlens(jnp.asarray(sorted([0, draw(number), length])))


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40)
def test_chunks_are_never_wrong(data: st.DataObject) -> None:
    """A wrong "whole" would leak, a wrong "skipped" would lose."""
    length = data.draw(st.integers(1, 13))
    mask = some_mask(data.draw, length)
    sizes = eqxa.ChunkSizes(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    allowed = np.asarray(masks.to_array(mask, length, length))[0]
    kinds = chunk_kinds(mask, length, length, sizes)
    q_size, kv_size = min(sizes.query, length), min(sizes.key, length)
    for (i, j), kind in np.ndenumerate(kinds):
        rows = slice(i * q_size, (i + 1) * q_size)
        part = allowed[rows, j * kv_size : (j + 1) * kv_size]
        assert part.any() or kind < 2, (mask, i, j)
        assert kind != 2 or part.all(), (mask, i, j)
        assert kind != 0 or not part.any(), (mask, i, j)


# Of these the chunks are told exactly, so that nothing is visited in vain.
EXACT = [
    *("causal", "window", "left window", "chunked", "sinks", "lengths"),
    *("blocks", "dense", "rule with a field", "segments"),
]


@pytest.mark.parametrize("name", EXACT)
def test_chunks_are_told_exactly(name: str) -> None:
    allowed = said(name)[0, 0].reshape(3, 4, 3, 4)
    some, every = allowed.any((1, 3)), allowed.all((1, 3))
    kinds = chunk_kinds(MASKS[name][0], LENGTH, LENGTH, eqxa.ChunkSizes(4, 4))
    np.testing.assert_array_equal(kinds, some.astype(int) + every)


@pytest.mark.numbers
def test_heads_have_chunks_of_their_own() -> None:
    """What one head skips, NaN included, another reads."""
    given: Arrays = {n: jnp.asarray(x) for n, x in arrays().items()}
    given["value"] = given["value"].at[:, 8:].set(jnp.nan)
    mask = PerHead(
        [SlidingWindow(None, -0), SlidingWindow(None, 0)] + [~SinkTokens(8)] * 2
    )
    out = flash(4, 4)(**given, mask=mask)
    assert np.isfinite(out[:, :8, :2]).all()
    assert np.isnan(out[:, :, 2:]).all()


@pytest.mark.numbers
def test_transforms() -> None:
    """Through jit, vmap and scan as arguments, and with a field changed."""
    given: Arrays = {n: jnp.asarray(x)[0] for n, x in arrays().items()}

    def attend(mask: masks.AbstractMask) -> Array:
        return flash(4, 4)(**given, mask=mask)

    lengths = jnp.asarray([3, 9])
    expected = jnp.stack([attend(Causal() & PrefixLM(int(n))) for n in lengths])

    def attend_prefix(length: Array) -> Array:
        return attend(Causal() & PrefixLM(length))

    mapped = jax.vmap(attend_prefix)(lengths)
    np.testing.assert_allclose(mapped, expected, rtol=1e-5, atol=1e-6)
    stacked = Causal(jnp.zeros(2, jnp.int32)) & PrefixLM(lengths)
    _, scanned = jax.lax.scan(lambda _, mask: (None, attend(mask)), None, stacked)
    np.testing.assert_allclose(scanned, expected, rtol=1e-5, atol=1e-6)

    @eqx.filter_jit
    def compiled(mask: masks.AbstractMask) -> Array:
        return attend(mask)

    mapped = jax.vmap(compiled)(stacked)
    np.testing.assert_allclose(mapped, expected, rtol=1e-5, atol=1e-6)
    rule = Rule(SameColour(jnp.asarray(IDS)))

    def colours(rule: Any) -> Array:
        return rule.fn.colours

    other = eqx.tree_at(colours, rule, jnp.zeros(12, jnp.int32))
    np.testing.assert_allclose(
        compiled(other), flash(12, 12)(**given), rtol=1e-5, atol=1e-6
    )


def test_new_numbers_compile_nothing() -> None:
    given: Arrays = {n: jnp.asarray(x) for n, x in arrays().items()}
    traced = 0

    @eqx.filter_jit
    def attend(mask: masks.AbstractMask) -> Array:
        nonlocal traced
        traced += 1
        return flash(8, 8)(**given, mask=mask)

    for seed in range(3):
        ids = jnp.asarray(np.sort(np.random.default_rng(seed).integers(0, 3, LENGTH)))
        pattern = jnp.asarray(normal(seed, 3, 3) > 0)
        attend(Segments(ids) & PrefixLM(jnp.asarray(seed)) & BlockSparse(pattern, 4))
    assert traced == 1


@pytest.mark.numbers
@pytest.mark.parametrize("name", ("chunked", "blocks by head", "per head", "rule"))
def test_decode(name: str) -> None:
    """Positions are those of the cache's tokens, and the queries the last of them."""
    given, start = arrays(), 1
    cache = {
        n: np.pad(given[n], [(0, 0), (start, 3), (0, 0), (0, 0)])
        for n in ("key", "value")
    }
    mask = MASKS[name][0]
    if name == "blocks by head":
        mask = BlockSparse(jnp.asarray(np.pad(BY_HEAD, [(0, 0), (0, 1), (0, 1)])), 5)
    out = eqxa.ragged_decode_attention(
        jnp.asarray(given["query"][:, -2:]),
        *(jnp.asarray(x) for x in cache.values()),
        *(jnp.full(2, n, jnp.int32) for n in (start, start + LENGTH)),
        mask=mask,
        block_size=4,
    )
    expected = want({**given, "mask": said(name)}, causal=True).output[:, -2:]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "formula"),
    (
        (
            Causal() & SlidingWindow(255, None),
            "Causal() & SlidingWindow(left=255, right=None)",
        ),
        (
            ~(SinkTokens(4) | Padding(9)) & Causal(),
            "~(SinkTokens(count=4) | Padding(lengths=9)) & Causal()",
        ),
        (
            (SinkTokens(4) | Padding(9)) & ~Causal(),
            "(SinkTokens(count=4) | Padding(lengths=9)) & ~Causal()",
        ),
        (Rule(by_head_and_batch), "Rule(by_head_and_batch)"),
    ),
)
def test_repr(mask: masks.AbstractMask, formula: str) -> None:
    assert repr(mask) == formula


def test_text() -> None:
    assert masks.draw(Causal(), 3, 4) == "#...\n##..\n###."
    coarse = masks.draw(Causal(), 128, 128).splitlines()
    assert (coarse[0], coarse[-1]) == ("+" + 63 * ".", 63 * "#" + "+")


def test_picture() -> None:
    pytest.importorskip("matplotlib")
    figure = masks.show(Causal(), 8, 8, chunk_sizes=eqxa.ChunkSizes(4, 4))
    assert "75% of the work" in figure.axes[1].get_title()
    np.testing.assert_array_equal(
        figure.axes[1].images[0].get_array(), [[1, 0], [2, 1]]
    )


def no_array(batch: Array, head: Array, q: Array, kv: Array) -> Any:
    return True


def closing_over(x: Array) -> masks.AbstractMask:
    return Rule(lambda batch, head, q, kv: kv <= q + x)


def closing_over_a_tracer() -> Any:
    return eqx.filter_eval_shape(closing_over, jnp.asarray(1))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no bool": (lambda: Rule(lambda b, h, q, k: q - k), TypeError, "returned int32"),
    "no array": (
        lambda: Rule(no_array),
        TypeError,
        "must return an array",
    ),
    "shape": (
        lambda: Rule(lambda b, h, q, k: jnp.ones(13, bool)),
        ValueError,
        "Rule.fn returned shape",
    ),
    "not callable": (
        lambda: Rule(jnp.ones(3)),  # pyright: ignore[reportArgumentType]  # that is it
        TypeError,
        "callable|Callable",
    ),
    "ids": (
        lambda: Segments(jnp.zeros(11, jnp.int32)),
        ValueError,
        r"Segments.q_ids has shape \(11,\)",
    ),
    "prefix": (
        lambda: PrefixLM(jnp.zeros(3, jnp.int32)),
        ValueError,
        r"PrefixLM.prefix_length has shape \(3,\)",
    ),
    "pattern": (
        lambda: BlockSparse(jnp.ones((2, 3), bool), 4),
        ValueError,
        "12 queries and 12 keys need 3 x 3",
    ),
    "pattern's heads": (
        lambda: BlockSparse(jnp.ones((3, 3, 3), bool), 4),
        ValueError,
        "BlockSparse.pattern has shape",
    ),
    "pattern's axes": (
        lambda: BlockSparse(jnp.ones(3, bool), 4),
        ValueError,
        "or its last two axes",
    ),
    "block": (
        lambda: BlockSparse(jnp.ones((3, 3), bool), 0),
        ValueError,
        "must be at least 1",
    ),
    "heads": (
        lambda: PerHead([Causal()]),
        ValueError,
        "PerHead has 1 masks, but query has 4",
    ),
    "window": (lambda: SlidingWindow(-1, 0), ValueError, "must not be negative"),
    "dilated": (lambda: Dilated((None, 0), 2), ValueError, "bounded on both sides"),
    "step": (lambda: Dilated(2, 0), ValueError, "Dilated.step is 0"),
    "size": (lambda: ChunkedLocal(0), ValueError, "ChunkedLocal.size is 0"),
    "sinks": (lambda: SinkTokens(-1), ValueError, "SinkTokens.count is -1"),
    "offset": (lambda: Causal(1.5), TypeError, "offset"),  # pyright: ignore[reportArgumentType]
    "closure": (
        closing_over_a_tracer,
        ValueError,
        "closes over 'x', which is traced",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    make, error, message = WRONG[name]
    given: Arrays = {n: jnp.asarray(x) for n, x in arrays().items()}
    with pytest.raises(error, match=message):
        eqxa.flash_attention(**given, mask=make())


def test_closing_over_what_is_known_is_no_error() -> None:
    assert masks.to_array(closing_over(jnp.asarray(1)), 2, 2).tolist() == [
        [[True, True], [True, True]]
    ]

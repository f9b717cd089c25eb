"""What is timed: a `Workload` is one call, a `Contest` is what runs against what."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .decoding import TRACE, Decoding, even

EJKERNEL = ("ejkernel 256", "ejkernel 512", "ejkernel 1024")  # its block sizes
OTHERS = ("jax.nn", "eqx.nn", *EJKERNEL, "torch", "tokamax")
RIVALS = ("flash", "jax.nn", "ejkernel 512", "torch", "tokamax")  # where time is dear
DECODERS = ("ragged", "paged", "read", "torch loop", "ejkernel decode")


class Arrays(NamedTuple):
    """The arguments of one call; `cotangent` is that of the output."""

    query: Array
    key: Array
    value: Array
    cotangent: Array
    segment_ids: Array | None


@dataclasses.dataclass(frozen=True)
class Workload:
    """One call of an attention: its shapes, its options, and what is asked of it.

    That is the output; or also the gradient, or the tangent along a direction.
    """

    length: int
    batch: int = 1
    q_heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = True
    window: tuple[int, int] | None = None
    num_documents: int = 1
    ragged: bool = False  # documents of random lengths, other ones in each row
    dropout: float = 0.0
    gradient: bool = False
    tangent: bool = False

    def arrays(self, seed: int = 0) -> Arrays:
        """Random arguments."""
        q_shape = (self.batch, self.length, self.q_heads, self.head_dim)
        kv_shape = (self.batch, self.length, self.kv_heads, self.head_dim)
        query, key, value, cotangent = (
            jax.random.normal(key, shape, self.dtype)
            for key, shape in zip(
                jax.random.split(jax.random.key(seed), 4),
                (q_shape, kv_shape, kv_shape, q_shape),
                strict=True,
            )
        )
        return Arrays(query, key, value, cotangent, self._segment_ids(seed))

    def shapes(self) -> Arrays:
        """As `arrays`, but shapes and dtypes alone: enough to compile for."""
        return jax.eval_shape(self.arrays)

    def input_bytes(self) -> int:
        """What query, key and value take together."""
        rows = self.batch * self.length * (self.q_heads + 2 * self.kv_heads)
        return rows * self.head_dim * jnp.dtype(self.dtype).itemsize

    def _segment_ids(self, seed: int) -> Array | None:
        if self.num_documents == 1:
            return None
        rng = np.random.default_rng(seed)
        starts = np.zeros((self.batch, self.length), np.int32)
        for row in starts:
            if self.ragged:
                inner = np.arange(1, self.length)
                row[rng.choice(inner, self.num_documents - 1, replace=False)] = 1
            else:
                row[:: self.length // self.num_documents] = 1
                row[0] = 0
        return jnp.asarray(starts.cumsum(1, dtype=np.int32))


def visible(workload: Workload, segment_ids: Array | None) -> Array | None:
    """Who may see whom, `batch 1 q_len kv_len`, for peers that need it as a mask."""
    positions = jnp.arange(workload.length)
    distance = positions - positions[:, None]
    masks = []
    if workload.causal:
        masks.append(distance[None, None] <= 0)
    if workload.window is not None:
        left, right = workload.window
        masks.append(((distance >= -left) & (distance <= right))[None, None])
    if segment_ids is not None:
        masks.append(same_document(segment_ids))
    mask = None
    for other in masks:
        mask = other if mask is None else mask & other
    return mask


def same_document(segment_ids: Array) -> Array:
    """Which pairs of tokens are of the same document, `batch 1 length length`."""
    return segment_ids[:, None, :, None] == segment_ids[:, None, None, :]


class Entry(NamedTuple):
    """One runner of a contest: a peer on a workload, under a label."""

    label: str
    peer: str
    workload: Workload | Decoding


@dataclasses.dataclass(frozen=True)
class Contest:
    """Entries that are timed in turn.

    `quick` names the labels that also run with `--quick`; if none does, the contest is
    left out there.
    """

    name: str
    entries: tuple[Entry, ...]
    quick: tuple[str, ...] = ()

    def shortened(self) -> "Contest":
        """The contest as `--quick` runs it."""
        kept = tuple(entry for entry in self.entries if entry.label in self.quick)
        return dataclasses.replace(self, entries=kept)


def _against_peers(
    name: str,
    workload: Workload,
    peers: tuple[str, ...] = ("flash", *OTHERS),
    quick: tuple[str, ...] = (),
    **baselines: Workload,
) -> Contest:
    """All peers on one workload; and flash on its baselines, such as plain causal."""
    entries = [Entry(f"flash {k}", "flash", v) for k, v in baselines.items()]
    entries += [Entry(peer, peer, workload) for peer in peers]
    if quick:
        quick += tuple(f"flash {label}" for label in baselines)
    return Contest(name, tuple(entries), quick)


LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 4, 16)
SPREADS = ("trace", "even")  # of the lengths in decoding


def contests() -> list[Contest]:
    """All of them; of each kind, short ones first."""
    made: list[Contest] = []
    for what, gradient in (("forward", False), ("gradient", True)):
        for length in LENGTHS:
            peers = ("flash", *OTHERS)
            if length <= 4096:
                peers = ("standard", *peers)
            if length <= 512:
                peers = ("AUTO", *peers)
            quick = {512: ("AUTO", "standard", *RIVALS), 2048: RIVALS}.get(length, ())
            workload = Workload(length, gradient=gradient)
            made.append(
                _against_peers(f"{what} causal {length}", workload, peers, quick)
            )
        made += _options(what, gradient)
    return made + _both_modes() + _decoding()


def _both_modes() -> list[Contest]:
    """What a call costs that is open to forward mode, in either mode."""
    plain = Workload(4096)
    tangent, gradient = (
        dataclasses.replace(plain, **{mode: True}) for mode in ("tangent", "gradient")
    )
    entries = (
        Entry("flash forward", "flash", plain),
        Entry("flash BOTH", "flash BOTH", tangent),
        Entry("jax.nn forward", "jax.nn", plain),
        Entry("jax.nn", "jax.nn", tangent),
    )
    modes = (
        Entry("flash", "flash", gradient),
        Entry("flash BOTH", "flash BOTH", gradient),
    )
    return [
        Contest(
            "value and tangent causal 4096", entries, ("flash forward", "flash BOTH")
        ),
        Contest(
            "gradient causal 4096 in the mode BOTH", modes, ("flash", "flash BOTH")
        ),
    ]


def _decoding() -> list[Contest]:
    """Steps over lengths from life, and over equal ones; and a cache much too large."""
    made: list[Contest] = []
    for batch in BATCHES:
        for spread in SPREADS:
            lengths = TRACE[:batch]
            step = Decoding(even(lengths) if spread == "even" else lengths)
            entries = tuple(Entry(peer, peer, step) for peer in DECODERS)
            quick = DECODERS[:-1] if (batch, spread) == (16, "trace") else ()
            made.append(Contest(f"decode {batch} {spread}", entries, quick))
    entries = (
        Entry("ragged in 2k", "ragged", Decoding(4 * (1000,), capacity=2048)),
        Entry("ragged", "ragged", Decoding(4 * (1000,), capacity=32768)),
    )
    labels = tuple(entry.label for entry in entries)
    return [*made, Contest("decode 4 of 1000 in 32k", entries, labels)]


def _options(what: str, gradient: bool) -> list[Contest]:
    """What differs from causal attention of 8 heads of 64 in float32."""
    plain = Workload(2048, gradient=gradient)
    long = Workload(8192, gradient=gradient)
    rows = Workload(8192, batch=4, gradient=gradient)
    quick = () if gradient else ("flash",)  # what of ours stands against ours
    new = dataclasses.replace
    made = [
        _against_peers(f"{what} full {length}", new(plain, length=length, causal=False))
        for length in ((2048,) if gradient else (2048, 4096))
    ]
    made += [
        _against_peers(
            f"{what} head dim 128", new(plain, head_dim=128, q_heads=4, kv_heads=4)
        ),
        _against_peers(
            f"{what} GQA 8/2", new(plain, kv_heads=2), quick=quick, ungrouped=plain
        ),
        _against_peers(
            f"{what} bfloat16", new(plain, dtype="bfloat16"), quick=quick, float32=plain
        ),
        _against_peers(
            f"{what} window (255, 0) at 8192",
            new(long, window=(255, 0)),
            RIVALS,
            quick,
            causal=long,
        ),
        _against_peers(
            f"{what} 16 documents at 8192",
            new(long, num_documents=16),
            RIVALS,
            quick,
            causal=long,
        ),
        _against_peers(
            f"{what} 4 x 16 ragged documents at 8192",
            new(rows, num_documents=16, ragged=True),
            peers=("flash",),
            causal=rows,
        ),
    ]
    return made

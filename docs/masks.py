"""Draws the gallery of masks: docs/masks.md and the pictures in docs/masks.

    nox -s gallery

Each picture shows the pairs that may attend, and what flash attention makes of them.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array

import eqx_attention as eqxa
from eqx_attention import masks

LENGTH = 1024
CHUNKS = eqxa.ChunkSizes(query=64, key=64)
HERE = Path(__file__).parent
BLOCKS = np.random.default_rng(0).random((16, 16)) < 0.1


def diagonals(batch: Array, head: Array, q: Array, kv: Array) -> Array:
    """A rule: stripes that get rarer with the distance."""
    del batch, head
    distance = q - kv
    return (distance >= 0) & (distance & (distance >> 2) == 0)


GALLERY: dict[str, tuple[str, masks.AbstractMask]] = {
    "causal": ("masks.Causal()", masks.Causal()),
    "window": ("masks.SlidingWindow(127, 0)", masks.SlidingWindow(127, 0)),
    "sinks": (
        "masks.SlidingWindow(127, 0) | masks.SinkTokens(64) & masks.Causal()",
        masks.SlidingWindow(127, 0) | masks.SinkTokens(64) & masks.Causal(),
    ),
    "dilated": ("masks.Dilated((8, 0), 32)", masks.Dilated((8, 0), 32)),
    "chunked": (
        "masks.ChunkedLocal(256) & masks.Causal()",
        masks.ChunkedLocal(256) & masks.Causal(),
    ),
    "prefix": ("masks.PrefixLM(300)", masks.PrefixLM(300)),
    "documents": (
        "masks.Documents.from_lengths(lengths) & masks.Causal()",
        masks.Documents.from_lengths(jnp.asarray([200, 90, 410, 324])) & masks.Causal(),
    ),
    "segments": (
        "masks.Segments(ids)",
        masks.Segments(jnp.asarray(np.arange(LENGTH) // 128 % 3)),
    ),
    "padding": (
        "masks.Padding(700) & masks.Causal()",
        masks.Padding(700) & masks.Causal(),
    ),
    "blocks": (
        "masks.BlockSparse(pattern, 64) | masks.SlidingWindow(64, 64)",
        masks.BlockSparse(jnp.asarray(BLOCKS), 64) | masks.SlidingWindow(64, 64),
    ),
    "rule": ("masks.Rule(diagonals)", masks.Rule(diagonals)),
    "dense": (
        "masks.Dense(array)",
        masks.Dense(jnp.asarray(np.hypot(*np.indices((LENGTH, LENGTH))) < LENGTH)),
    ),
    "complement": (
        "~masks.SlidingWindow(200, 200)",
        ~masks.SlidingWindow(200, 200),
    ),
}


def main() -> None:
    """Draws all, and writes the page."""
    lines = [
        "# A gallery of masks",
        "",
        f"{LENGTH} queries and keys, in chunks of {CHUNKS.query} x {CHUNKS.key}. "
        "On the left the pairs that may attend; on the right the chunks that are",
        "skipped (white), whole (blue: nothing is masked there) or partial (orange). "
        "`PerHead([...])` has one of these for each head.",
        "Made by `nox -s gallery`.",
    ]
    for name, (formula, mask) in GALLERY.items():
        figure = masks.show(mask, LENGTH, LENGTH, chunk_sizes=CHUNKS)
        figure.suptitle(formula)  # pyright: ignore[reportUnknownMemberType]  # its **kwargs
        figure.savefig(HERE / "masks" / f"{name}.png", dpi=70)  # pyright: ignore[reportUnknownMemberType]  # its **kwargs
        lines += ["", f"## `{formula}`", "", f"![{formula}](masks/{name}.png)"]
    (HERE / "masks.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

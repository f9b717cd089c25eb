"""Draws docs/memory.png: the temporary memory of attention, as XLA plans it.

    python -m pip install . matplotlib
    python docs/memory.py

Nothing is run: each function is compiled for shapes alone, and the figure is what
`compiled.memory_analysis()` says it needs beside its arguments and its results.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
from jax import Array

import eqx_attention as eqxa

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
NUM_HEADS, HEAD_DIM = 8, 64
MIB = 2**20
PICTURE = Path(__file__).with_suffix(".png")

Attend = Callable[[Array, Array, Array], Array]


def flash(query: Array, key: Array, value: Array) -> Array:
    """Chunk by chunk."""
    return eqxa.flash_attention(query, key, value, causal=True)


def standard(query: Array, key: Array, value: Array) -> Array:
    """The whole matrix at once."""
    return eqxa.standard_attention(query, key, value, causal=True)


def of_jax(query: Array, key: Array, value: Array) -> Array:
    """What JAX has."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


ATTENTIONS: dict[str, tuple[Attend, str]] = {
    "standard_attention": (standard, "s"),
    "jax.nn.dot_product_attention": (of_jax, "x"),
    "flash_attention": (flash, "o"),
}


def gradient(attend: Attend) -> Callable[[Array, Array, Array], object]:
    """The gradients of query, key and value."""

    def loss(query: Array, key: Array, value: Array) -> Array:
        return jnp.sum(attend(query, key, value) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))


def temporary_mib(function: Callable[..., object], length: int) -> float:
    """The memory that one call needs beside arguments and results."""
    heads = jax.ShapeDtypeStruct((1, length, NUM_HEADS, HEAD_DIM), jnp.float32)
    memory = jax.jit(function).lower(heads, heads, heads).compile().memory_analysis()
    if memory is None:
        raise RuntimeError("this backend does not say how much memory it plans")
    return memory.temp_size_in_bytes / MIB


def main() -> None:
    """Compiles, prints a table, and draws the picture."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True)
    for panel, title in zip(panels, ("forward", "forward and gradient"), strict=True):
        for name, (attend, marker) in ATTENTIONS.items():
            function = attend if title == "forward" else gradient(attend)
            mib = [temporary_mib(function, length) for length in LENGTHS]
            print(f"{title}, {name}:", *(f"{x:.1f}" for x in mib), "MiB", flush=True)
            panel.loglog(LENGTHS, mib, marker=marker, markersize=5, label=name)
        panel.set_title(title)
        panel.set_xlabel("length (tokens)")
        panel.set_xticks(LENGTHS, [f"{n // 1024}k" for n in LENGTHS], minor=False)
        panel.xaxis.set_minor_locator(plt.NullLocator())
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("temporary memory (MiB)")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    main()

"""Draws docs/entmax.png: the weights that softmax and entmax give to the same logits.

python -m pip install . matplotlib
python docs/entmax.py
"""

from pathlib import Path

import jax
import matplotlib
import numpy as np
from jax import Array

import eqx_attention as eqxa

LENGTH = 32
NORMALIZERS: dict[str, eqxa.Softmax | eqxa.Entmax] = {
    "softmax": eqxa.Softmax(),
    "alpha = 1.25": eqxa.Entmax(1.25),
    "alpha = 1.5": eqxa.Entmax(1.5),
    "alpha = 2 (sparsemax)": eqxa.Entmax(2.0),
}
PICTURE = Path(__file__).with_suffix(".png")


def weights_of(normalizer: eqxa.Softmax | eqxa.Entmax) -> Array:
    """The weights of one head over a sequence of random tokens, causal."""
    of_query, of_key = jax.random.split(jax.random.key(0))
    query = 1.5 * jax.random.normal(of_query, (LENGTH, 1, 16))
    key = jax.random.normal(of_key, (LENGTH, 1, 16))
    _, weights = eqxa.standard_attention(
        query, key, key, causal=True, normalizer=normalizer, return_weights=True
    )
    return weights[0]


def main() -> None:
    """Prints how many weights are 0, and draws all of them."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        2, len(NORMALIZERS), figsize=(10, 4.6), height_ratios=(3, 2), sharey="row"
    )
    for (title, normalizer), panel, last in zip(
        NORMALIZERS.items(), *panels, strict=True
    ):
        weights = np.asarray(weights_of(normalizer))
        zeros = np.mean(weights[np.tril_indices(LENGTH)] == 0)
        print(f"{title}: {zeros:.0%} of the weights are 0")
        shown = np.where(weights > 0, weights, np.nan)
        panel.imshow(shown, vmin=0, vmax=0.8, cmap="viridis_r")
        panel.set_title(f"{title}\n{zeros:.0%} zeros", fontsize=10)
        panel.set_xticks([])
        panel.set_yticks([])
        last.bar(np.arange(LENGTH), weights[-1], width=1.0)
        last.set_xlabel("key")
    panels[0, 0].set_ylabel("query")
    panels[1, 0].set_ylabel("weights of the\nlast query")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    main()

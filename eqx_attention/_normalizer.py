"""What makes weights of a row of logits: softmax, or entmax, which is sparse."""

from typing import TypeAlias

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._typing import Number


class Softmax(eqx.Module):
    r"""$p_j \propto e^{x_j}$: every key that may be attended to has a weight."""


class Entmax(eqx.Module):
    r"""Weights of which most are exactly 0.

    $$p_j = \bigl[(\alpha - 1) x_j - \tau\bigr]_+^{1 / (\alpha - 1)}$$

    with the threshold tau at which they sum up to one (Peters et al. 2019, arXiv
    1905.05702). Alpha says how sparse: it tends to softmax as alpha tends to 1, and is
    sparsemax (Martins & Astudillo 2016, arXiv 1602.02068) at 2.

    **Arguments:**

    - `alpha`: above 1, at most 2; by default 1.5. One for all heads, as a float or a
        0-d array, or an array of one for each of the query's heads. Arrays have a
        gradient (Correia et al. 2019, arXiv 1909.00015): a way to keep a trained one in
        range is `alpha = 1 + jax.nn.sigmoid(x)`.

    Weights are computed in float32 or wider. Near 1 rounding errors grow as
    `1 / (alpha - 1)`: at 1.01 the relative error of float32 is about 1e-5.

    **Raises:** `TypeError` for what is no float, `ValueError` for a float out of range
    or an array of another shape. What an array holds is not looked at.
    """

    alpha: Number | Float[Array, "..."] = 1.5

    def __check_init__(self) -> None:
        _check_alpha(self.alpha)


def _check_alpha(alpha: object) -> None:
    if isinstance(alpha, Array):
        if alpha.ndim > 1 or not jnp.issubdtype(alpha.dtype, jnp.floating):
            raise ValueError(
                f"Entmax has alpha of shape {alpha.shape} and {alpha.dtype}, but needs "
                "floating point numbers of shape () or (q_heads,)"
            )
    elif isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(f"Entmax has alpha {alpha!r}, but needs a float or an array")
    elif not 1 < alpha <= 2:
        raise ValueError(
            f"Entmax has alpha {alpha}, but needs one above 1 and at most 2 (1 would "
            "be Softmax())"
        )


Normalizer: TypeAlias = Softmax | Entmax

SOFTMAX = Softmax()


def check_entmax(**given: object) -> None:
    """What entmax can't do is an error, not ignored; by argument, None if not asked."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is given, but normalizer is Entmax: {_WHY[name]}")


_WHY = {
    "softmax_aux": "its weights have no denominator that a sink could add to",
    "return_lse": "its weights have no sum of exponentials",
    "normalize_output": "its threshold needs all keys, so parts can't be merged",
}

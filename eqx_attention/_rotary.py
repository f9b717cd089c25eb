"""Rotary position embedding, and its variants for longer contexts."""

import abc
import dataclasses
import math
from typing import final

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Integer
from typing_extensions import override

from ._config import check_int, check_is_a, check_number
from ._jax import accumulation_dtype
from ._typing import Number, checked, int32


class AbstractRotaryScaling(abc.ABC):
    """How the frequencies of a rotary embedding are stretched to a longer context."""

    @abc.abstractmethod
    def scale(
        self, frequencies: Float64[np.ndarray, " half"], theta: float
    ) -> tuple[Float64[np.ndarray, " half"], float]:
        r"""The new frequencies, and what cosine and sine are multiplied with.

        **Arguments:**

        - `frequencies`: those without scaling, $\theta^{-2i/d}$ for $0 \le i < d/2$, in
            radians per token.
        - `theta`: $\theta$.
        """


@final
@dataclasses.dataclass(frozen=True)
class LinearScaling(AbstractRotaryScaling):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595).

    **Arguments:**

    - `factor`: positive; all frequencies are divided by it.

    **Raises:** `TypeError` or `ValueError` for what is no positive number.
    """

    factor: Number

    def __post_init__(self) -> None:
        _check_positive(factor=self.factor)

    @override
    def scale(
        self, frequencies: Float64[np.ndarray, " half"], theta: float
    ) -> tuple[Float64[np.ndarray, " half"], float]:
        return frequencies / self.factor, 1.0


@final
@dataclasses.dataclass(frozen=True)
class NTKScaling(AbstractRotaryScaling):
    r"""NTK-aware scaling (Peng et al. 2023, arXiv 2309.00071, section 3.1).

    The base becomes $\theta \cdot \text{factor}^{d/(d-2)}$, so that the lowest
    frequency is divided by the factor and the highest stays. The "dynamic" kind with a
    factor of $f$ is, at a length $L$ above the original $L_0$, this one with a factor
    of $f L / L_0 - f + 1$.

    **Arguments:**

    - `factor`: positive. The embedding needs a `dim` of at least 4.

    **Raises:** `TypeError` or `ValueError` for what is no positive number.
    """

    factor: Number

    def __post_init__(self) -> None:
        _check_positive(factor=self.factor)

    @override
    def scale(
        self, frequencies: Float64[np.ndarray, " half"], theta: float
    ) -> tuple[Float64[np.ndarray, " half"], float]:
        half = len(frequencies)
        if half < 2:
            raise ValueError(f"dim is {2 * half}, but NTKScaling needs at least 4")
        return frequencies * self.factor ** (-np.arange(half) / (half - 1)), 1.0


@final
@dataclasses.dataclass(frozen=True)
class YaRNScaling(AbstractRotaryScaling):
    r"""YaRN (Peng et al. 2023, arXiv 2309.00071).

    What turns more than `beta_fast` times within the original length keeps its
    frequency, what turns less than `beta_slow` times has it divided by `factor`, and
    between the two there is a ramp.

    **Arguments:**

    - `factor`: positive; how many times the original length is to be reached.
    - `original_length`: tokens of the context that the model was trained on.
    - `beta_fast`, `beta_slow`: in turns; by default 32 and 1.
    - `attention_factor`: what cosine and sine are multiplied with, so the logits with
        its square; by default $0.1 \ln(\text{factor}) + 1$, or 1 for a factor below 1.
        (A model that has `mscale` and `mscale_all_dim` as DeepSeek's do, and both are
        the same $m$, has 1 here, and a `softmax_scale` that is $(0.1\, m
        \ln(\text{factor}) + 1)^2$ times the usual one.)
    - `truncate`: whether the ramp begins and ends at whole dimensions; by default True.

    **Raises:** `TypeError` or `ValueError` for what is no positive number, and for a
    `beta_fast` that is not above `beta_slow`.
    """

    factor: Number
    original_length: int
    beta_fast: Number = 32.0
    beta_slow: Number = 1.0
    attention_factor: Number | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_int("original_length", self.original_length)
        _check_positive(
            factor=self.factor,
            original_length=self.original_length,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )
        if self.attention_factor is not None:
            _check_positive(attention_factor=self.attention_factor)
        check_is_a("truncate", self.truncate, bool)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast is {self.beta_fast}, but must be above beta_slow, which is "
                f"{self.beta_slow}"
            )

    @override
    def scale(
        self, frequencies: Float64[np.ndarray, " half"], theta: float
    ) -> tuple[Float64[np.ndarray, " half"], float]:
        half = len(frequencies)

        def index(turns: Number) -> float:
            """Which pair of dimensions turns so often within the original length."""
            return half * math.log(self.original_length / (2 * math.pi * turns), theta)

        begin, end = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, 2 * half - 1)
        # A ramp of no length is a step.
        width = end - begin if end != begin else 1e-3
        ramp = np.clip((np.arange(half) - begin) / width, 0, 1)
        scaled = frequencies * (1 - ramp) + frequencies / self.factor * ramp
        if self.attention_factor is not None:
            return scaled, float(self.attention_factor)
        return scaled, 0.1 * math.log(max(self.factor, 1)) + 1


@final
@dataclasses.dataclass(frozen=True)
class Llama3Scaling(AbstractRotaryScaling):
    """The scaling of Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783).

    What turns more than `high_frequency_factor` times within the original length keeps
    its frequency, what turns less than `low_frequency_factor` times has it divided by
    `factor`, and between the two it is a mean of both.

    **Arguments:**

    - `factor`: positive; 8 in Llama 3.1, 32 in Llama 3.2.
    - `original_length`: tokens of the context that the model was trained on; 8192.
    - `low_frequency_factor`, `high_frequency_factor`: in turns; by default 1 and 4.

    **Raises:** `TypeError` or `ValueError` for what is no positive number, and for a
    `high_frequency_factor` that is not above `low_frequency_factor`.
    """

    factor: Number = 8.0
    original_length: int = 8192
    low_frequency_factor: Number = 1.0
    high_frequency_factor: Number = 4.0

    def __post_init__(self) -> None:
        check_int("original_length", self.original_length)
        _check_positive(
            factor=self.factor,
            original_length=self.original_length,
            low_frequency_factor=self.low_frequency_factor,
            high_frequency_factor=self.high_frequency_factor,
        )
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor is {self.high_frequency_factor}, but must be "
                f"above low_frequency_factor, which is {self.low_frequency_factor}"
            )

    @override
    def scale(
        self, frequencies: Float64[np.ndarray, " half"], theta: float
    ) -> tuple[Float64[np.ndarray, " half"], float]:
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequencies * kept + frequencies / self.factor * (1 - kept), 1.0


@final
class RotaryEmbedding(eqx.Module):
    r"""Turns pairs of a head's numbers by angles that grow with the position.

    (Su et al. 2021, arXiv 2104.09864.) Pair $i$ of a token at position $p$ turns by $p
    \theta^{-2i/d}$. A product of a query and a key then depends on how far apart the
    tokens are, and not on where they stand. Cosine, sine and the turn are computed in
    float32, or float64 for float64 heads. It has no parameters.

    **Fields:**

    - `dim`: $d$, even: how many numbers of a head, from the first on, are turned. Those
        after them stay as they are.
    - `theta`: $\theta$, above 1; by default 10000.
    - `interleaved`: if False, numbers $i$ and $i + d/2$ are a pair, as in GPT-NeoX, and
        in Llama as the transformers library has it. If True, $2i$ and $2i + 1$ are, as
        in GPT-J, in DeepSeek, and in Llama as its authors have it.
    - `scaling`: for longer contexts; [`eqx_attention.LinearScaling`][],
        [`eqx_attention.NTKScaling`][], [`eqx_attention.YaRNScaling`][],
        [`eqx_attention.Llama3Scaling`][] or None.

    **Raises:** `ValueError` for an odd `dim` and a `theta` of 1 or less, `TypeError`
    for what is no number.
    """

    dim: int = eqx.field(static=True)
    theta: Number = eqx.field(static=True, default=10000.0)
    interleaved: bool = eqx.field(static=True, default=False)
    scaling: AbstractRotaryScaling | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check_int("dim", self.dim)
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"dim is {self.dim}, but a rotary embedding turns pairs, so dim must "
                "be even and at least 2"
            )
        check_number("theta", self.theta)
        if not 1 < self.theta < math.inf:
            raise ValueError(f"theta is {self.theta}, but must be above 1 and finite")
        check_is_a("interleaved", self.interleaved, bool)
        if self.scaling is not None:
            check_is_a("scaling", self.scaling, AbstractRotaryScaling)
        self.frequencies()

    def frequencies(self) -> tuple[Float64[np.ndarray, " half"], float]:
        """Radians per token of each pair, and what cosine and sine are scaled by."""
        half = self.dim // 2
        frequencies = float(self.theta) ** (-np.arange(half) / half)
        if self.scaling is None:
            return frequencies, 1.0
        return self.scaling.scale(frequencies, float(self.theta))

    @checked
    def __call__(
        self,
        x: Float[Array, "*batch length heads head_dim"],
        positions: Integer[Array, "*#batch length"] | None = None,
    ) -> Float[Array, "*batch length heads head_dim"]:
        """The heads, turned.

        **Arguments:**

        - `x`: queries or keys, `*batch length heads head_dim`.
        - `positions`: integers, `*batch length`, where batch axes may be left out or
            be 1: where each token stands. By default 0, 1, 2 and so on.

        **Returns:** an array like `x`.

        **Raises:** `ValueError` if heads are narrower than `dim`.
        """
        length, _, head_dim = x.shape[-3:]
        if head_dim < self.dim:
            raise ValueError(
                f"x has heads of width {head_dim}, but dim is {self.dim}: a rotary "
                "embedding turns no more numbers than a head has"
            )
        if positions is None:
            positions = jnp.arange(length, dtype=jnp.int32)
        dtype = accumulation_dtype(x)
        frequencies, magnitude = self.frequencies()
        angles = int32("positions", positions).astype(dtype)
        # *batch length heads half: heads turn alike.
        angles = angles.reshape((1,) * (x.ndim - 2 - angles.ndim) + angles.shape)
        angles = jnp.multiply(
            angles[..., None, None],
            jnp.asarray(frequencies, dtype).reshape((1,) * (x.ndim - 1) + (-1,)),
        )
        cos, sin = (jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude)
        turned, rest = x[..., : self.dim].astype(dtype), x[..., self.dim :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            pairs = jnp.stack((a * cos - b * sin, a * sin + b * cos), axis=-1)
            turned = pairs.reshape(turned.shape)
        else:
            a, b = jnp.split(turned, 2, axis=-1)
            turned = jnp.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)
        return jnp.concatenate((turned.astype(x.dtype), rest), axis=-1)


def _check_positive(**numbers: Number) -> None:
    """Refuses what is no positive finite number."""
    for name, number in numbers.items():
        check_number(name, number)
        if not 0 < number < math.inf:
            raise ValueError(f"{name} is {number}, but must be positive and finite")

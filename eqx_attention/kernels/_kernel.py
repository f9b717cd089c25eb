"""What a kernel of another library states of itself, and how it is called."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from .._config import ChunkSizes
from .._request import Request
from .._typing import int32
from ._first_order import first_order

OLDEST_GPU = 8.0
"""The compute capability that flash attention's kernels need: Ampere."""


@dataclasses.dataclass(frozen=True)
class Support:
    """What a backend can do. What is not named it refuses.

    **Fields:**

    - `options`: those of [`eqx_attention.attention`][] it takes, each with its limits
        in words, or "yes".
    - `dtypes`: of query, key and value, which have to agree; empty means any.
    - `head_dims`, `derivatives`, `seen_on`: in words; the last says where it was run.
    """

    options: Mapping[str, str]
    dtypes: tuple[str, ...]
    head_dims: str
    derivatives: str
    seen_on: str


class Operands(eqx.Module):
    """What a kernel computes from: one batch axis, and no key that nobody sees."""

    query: Float[Array, "batch q_len q_heads qk_dim"]
    key: Float[Array, "batch kv_len kv_heads qk_dim"]
    value: Float[Array, "batch kv_len kv_heads v_dim"]
    softmax_aux: Float[Array, " q_heads"] | None
    segment_ids: Int[Array, "batch q_len"] | None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of another library.

    **Fields:**

    - `module`, `package`: what is imported when it is first called, and what pip
        installs it.
    - `platform`, `device`: of JAX, and what the device's kind has in its name.
    - `automatic`: whether AUTO may take it.
    - `support`: what it states; `limits` gives the reason why a request that fits that
        is refused all the same, or None.
    - `attend`: the output, `batch q_len q_heads v_dim`.
    - `chunk_rule`: the chunk sizes if none are given; None if it takes none.
    """

    module: str
    package: str
    platform: str
    device: str
    automatic: bool
    support: Support
    limits: Callable[[Request], str | None]
    attend: Callable[[Request, Operands], Array]
    chunk_rule: Callable[[Request], ChunkSizes] | None = None

    def absence(self) -> str | None:
        """Why it can't run here, whatever is asked; None if it can."""
        device = jax.devices()[0]
        kind = device.device_kind
        if jax.default_backend() != self.platform or self.device not in kind:
            where = {"gpu": f"GPUs of {self.device}", "tpu": "TPUs"}[self.platform]
            return f"it runs on {where}, and this is a {kind}"
        capability = str(getattr(device, "compute_capability", "0"))
        if self.platform == "gpu" and float(capability) < OLDEST_GPU:
            return (
                f"it needs a compute capability of {OLDEST_GPU}, and has {capability}"
            )
        if not is_installed(self.module):
            return f"{self.package} is not installed: pip install {self.package}"
        return None

    def refusal(self, request: Request) -> str | None:
        """Why it can't do what is asked; None if it can."""
        for name in sorted(request.asked - self.support.options.keys()):
            return f"it can't do {name}"
        if len(set(request.dtypes)) > 1:
            return f"query, key and value are {', '.join(request.dtypes)}: it needs one"
        if request.dtypes[0] not in self.support.dtypes:
            return (
                f"query is {request.dtypes[0]}: it needs "
                f"{' or '.join(self.support.dtypes)}"
            )
        if request.batch == 0 or 0 in (request.q_heads, request.v_dim):
            return "an axis has no size"
        if request.has_empty_rows:
            return "a query has no key to see, which it would not leave out"
        return self.limits(request)

    def __call__(
        self,
        request: Request,
        query: Float[Array, "*batch q_len q_heads qk_dim"],
        key: Float[Array, "*batch kv_len kv_heads qk_dim"],
        value: Float[Array, "*batch kv_len kv_heads v_dim"],
        softmax_aux: Float[Array, "..."] | None = None,
        segment_ids: Integer[Array, "*#batch q_len"] | None = None,
    ) -> Float[Array, "*batch q_len q_heads v_dim"]:
        """The output. What `refusal` refuses must not get here."""
        batch_shape = query.shape[:-3]
        if segment_ids is not None:
            segment_ids = int32("q_segment_ids", segment_ids)
            segment_ids = jnp.broadcast_to(segment_ids, (*batch_shape, request.q_len))
            query = _where(_real(segment_ids), query)
        seen = _seen(request, segment_ids)
        key, value = _where(seen, key), _where(seen, value)
        operands = Operands(
            query.reshape(request.batch, *query.shape[-3:]),
            key.reshape(request.batch, *key.shape[-3:]),
            value.reshape(request.batch, *value.shape[-3:]),
            _one_sink(softmax_aux, request.q_heads),
            None
            if segment_ids is None
            else segment_ids.reshape(request.batch, request.q_len),
        )
        # Padding sees nothing but padding, whose values are 0: so is its output.
        out = first_order(operands, functools.partial(self.attend, request))
        return out.reshape(*batch_shape, request.q_len, request.q_heads, request.v_dim)


def _seen(request: Request, segment_ids: Array | None) -> Array | None:
    """Which keys some query may see, to broadcast over `*batch kv_len heads dim`.

    The others may hold NaN, and a kernel multiplies what it masks. None if all are
    seen. Ids are those of queries and keys alike.
    """
    start, end = request.seen_keys
    if (start, end) == (0, request.kv_len):
        return None if segment_ids is None else _real(segment_ids)
    index = jnp.arange(request.kv_len, dtype=jnp.int32)
    seen = ((index >= start) & (index < end))[:, None, None]
    return seen if segment_ids is None else _real(segment_ids) & seen


def _real(segment_ids: Array) -> Array:
    """Which tokens are no padding, to broadcast over `*batch length heads dim`."""
    return (segment_ids >= 0)[..., None, None]


def _where(seen: Array | None, x: Array) -> Array:
    """`x`, with zeros in the place of what is not seen."""
    if seen is None:
        return x
    seen = seen.reshape((1,) * (x.ndim - seen.ndim) + seen.shape)
    return jnp.where(seen, x, jnp.zeros_like(x))


def _one_sink(softmax_aux: Array | None, q_heads: int) -> Array | None:
    """Sinks of a head as one: they have no values, so that only their sum counts."""
    if softmax_aux is None:
        return None
    each = jnp.atleast_2d(softmax_aux.astype(jnp.float32))
    each = jnp.broadcast_to(each, (q_heads, softmax_aux.shape[-1]))
    highest = jax.lax.stop_gradient(jnp.max(each, axis=-1, initial=-jnp.inf))
    highest = jnp.where(jnp.isfinite(highest), highest, jnp.zeros_like(highest))
    total = jnp.sum(jnp.exp(each - highest[:, None]), axis=-1)
    nothing = total == 0  # sinks of minus infinity: `logsumexp` has no gradient there
    return jnp.where(
        nothing, -jnp.inf, highest + jnp.log(jnp.where(nothing, 1.0, total))
    )


def is_installed(module: str) -> bool:
    """Whether a module can be found; its package is not imported for that."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None

"""Kernels of other libraries: what they state of themselves is so, without the device.

Splash attention is computed by Pallas' interpreter. The others are lowered, or computed
by what their libraries have for a CPU.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import eqx_attention as eqxa
from eqx_attention import _backend, tuning
from eqx_attention._backend import KERNELS, Backend
from eqx_attention._request import Request
from eqx_attention.kernels import _fa4, _splash, _tokamax
from eqx_attention.kernels._kernel import Kernel

from . import reference
from .helpers import Arrays, close, normal, qkv
from .test_devices import lower, without_checks_of_values as without_checks_of_values

BOTTOM_RIGHT = eqxa.Alignment.BOTTOM_RIGHT
TRAINED = ("query", "key", "value", "softmax_aux")


def on_cpu(kernel: Kernel, **how: Any) -> Kernel:
    """The kernel where it can be computed here."""
    attend = functools.partial(kernel.attend, **how)
    return dataclasses.replace(kernel, attend=attend, platform="cpu", device="cpu")


SPLASH_HERE = on_cpu(_splash.SPLASH, interpret=True)


def heads(**sizes: Any) -> Arrays:
    """Query, key and value in sizes that every kernel takes."""
    return qkv(**{"q_len": 128, "kv_len": 128, "qk_dim": 64, "v_dim": 64, **sizes})


def check(
    kernel: Kernel,
    arrays: Arrays,
    *,
    tolerance: float = 3e-5,
    hidden: Callable[[Arrays], Arrays] | None = None,
    **options: Any,
) -> None:
    """Output and gradients against the reference, by way of `attention`.

    `hidden` is put into the arrays for the kernel alone: what nobody may see.
    """
    d_output = normal(90, *arrays["query"].shape[:-1], arrays["value"].shape[-1])
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    given = arrays if hidden is None else hidden(arrays)
    given = {name: jnp.asarray(x) for name, x in given.items()}
    trained = {name: x for name, x in given.items() if name in TRAINED}
    rest = {name: x for name, x in given.items() if name not in TRAINED}
    backend = next(b for b, k in KERNELS.items() if k is kernel)

    @jax.jit
    def run(trained: Arrays, rest: Arrays) -> Any:
        def attend(trained: Arrays) -> Any:
            return eqxa.attention(**trained, **rest, backend=backend, **options)

        out, pull = jax.vjp(attend, trained)
        return out, *pull(jnp.asarray(d_output, out.dtype))

    out, grads = run(trained, rest)
    d_output = np.asarray(jnp.asarray(d_output, out.dtype))
    options.pop("chunk_sizes", None)
    if "alignment" in options:
        options["alignment"] = options["alignment"].value
    named = {n: x for n, x in arrays.items() if n not in ("query", "key", "value")}
    qkv = (arrays[name] for name in ("query", "key", "value"))
    query, key, value = (np.asarray(x, np.float64) for x in qkv)
    want = reference.attention(query, key, value, **named, **options).output
    close("output", out, want, tolerance)
    d_lse = np.zeros((*query.shape[:-3], query.shape[-2], query.shape[-3]))
    wanted = reference.gradients(
        query, key, value, d_output.astype(np.float64), d_lse, **named, **options
    )
    for name, gradient in grads.items():
        assert gradient.dtype == given[name].dtype
        close(f"gradient of {name}", gradient, wanted[name], tolerance)


@pytest.fixture
def splash(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Splash attention, to be had on this machine."""
    monkeypatch.setitem(KERNELS, Backend.SPLASH, SPLASH_HERE)  # pyright: ignore[reportArgumentType]  # a dict
    return SPLASH_HERE


def test_splash_with_documents_window_cap_and_sinks(splash: Kernel) -> None:
    """Padding holds NaN, in another place in each batch element; a head has no sink."""
    arrays = heads(q_len=256, kv_len=256, v_dim=128)
    ids = np.zeros((2, 256), np.int32)
    ids[0, 100:], ids[0, 230:], ids[1, :30] = 1, -1, -3
    sinks = normal(7, 4, 2)
    sinks[1] = -np.inf
    arrays |= {"softmax_aux": sinks, "q_segment_ids": ids}

    def hidden(arrays: Arrays) -> Arrays:
        padded = {n: arrays[n].copy() for n in ("query", "key", "value")}
        for x in padded.values():
            x[ids < 0] = np.nan
        return arrays | padded

    check(
        splash,
        arrays,
        hidden=hidden,
        sliding_window=(40, 10),
        logits_soft_cap=2.0,
        softmax_scale=0.2,
    )


def test_splash_where_all_end_together(splash: Kernel) -> None:
    """In bfloat16, with one key that the window leaves to nobody and which is NaN."""
    arrays = heads(kv_len=256, dtype=jnp.bfloat16, batch=())

    def hidden(arrays: Arrays) -> Arrays:
        unseen = {n: arrays[n].copy() for n in ("key", "value")}
        for x in unseen.values():
            x[:28] = np.nan
        return arrays | unseen

    check(
        splash,
        arrays,
        tolerance=2e-2,
        hidden=hidden,
        causal=True,
        sliding_window=(100, 0),
        alignment=BOTTOM_RIGHT,
    )


def test_splash_in_larger_blocks(splash: Kernel) -> None:
    sizes = eqxa.ChunkSizes(128, 256)
    arrays = heads(q_len=256, kv_len=512, batch=(1, 1))
    check(splash, arrays, causal=True, query_offset=30, chunk_sizes=sizes)


def test_splash_in_a_vmap(splash: Kernel) -> None:
    arrays = {name: jnp.asarray(x) for name, x in heads().items()}

    def attend(query: Any, key: Any, value: Any) -> Any:
        return eqxa.attention(query, key, value, causal=True, backend=Backend.SPLASH)

    mapped = jax.jit(jax.vmap(attend))(**arrays)
    close("output", mapped, eqxa.standard_attention(**arrays, causal=True))


def test_a_second_derivative_says_what_to_do() -> None:
    loss, arrays = gradients(SPLASH_HERE, heads(batch=(), q_heads=1, kv_heads=1))

    def norm(arrays: Arrays) -> Any:
        return jnp.sum(loss(arrays)[1]["query"] ** 2)

    with pytest.raises(Exception, match=r"ask for Backend\.FLASH"):
        jax.grad(norm)(arrays)
    with pytest.raises(Exception, match=r"ask for Backend\.FLASH"):
        jax.jvp(norm, (arrays,), (arrays,))


def test_auto_takes_a_kernel_that_can_do_it(
    splash: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.float32)

    def chosen(**options: Any) -> Any:
        choice = eqxa.resolve(x, x, **options)
        return choice.backend, choice.reason.partition("; not ")[2]

    several = "SPLASH: there are several devices, or it is within shard_map"
    assert chosen() == (Backend.FLASH, several)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("batch",))

    def within(x: jax.Array) -> jax.Array:
        assert eqxa.resolve(x, x).backend is Backend.FLASH
        return x

    rows = PartitionSpec("batch")
    mapped = jax.shard_map(within, mesh=mesh, in_specs=rows, out_specs=rows)
    jax.eval_shape(jax.jit(mapped), x)
    assert chosen() == (Backend.SPLASH, "")
    bias = jnp.zeros((1024, 1024))
    assert chosen(bias=bias) == (Backend.FLASH, "SPLASH: it can't do bias")
    assert chosen(return_lse=True)[0] is Backend.FLASH
    assert eqxa.resolve(x, x).chunk_sizes == eqxa.ChunkSizes(512, 512)
    # Tuned sizes of a bucket that do not fit this length are not taken.
    key = Request.of(x, x).tuning_key("splash", "forward")
    y = jax.ShapeDtypeStruct((1, 640, 4, 64), jnp.float32)
    with tuning.overlay({key: tuning.Entry("splash", 1024, 128, 0.5)}):
        choice = eqxa.resolve(x, x)
        assert (choice.origin, choice.chunk_sizes) == (
            "cached",
            eqxa.ChunkSizes(1024, 128),
        )
        assert eqxa.resolve(y, y).origin == "rule"
    small = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.float32)
    assert eqxa.resolve(small, small).backend is Backend.STANDARD


def asking(name: str, q_len: int = 256) -> dict[str, Any]:
    """Options that ask for one thing."""
    ids = jnp.zeros((2, q_len), jnp.int32)
    asked: dict[str, Any] = {
        "mask": jnp.ones((q_len, 256), bool),
        "bias": jnp.zeros((q_len, 256)),
        "softmax_aux": jnp.zeros(2),
        "num_sink_tokens": 1,
        "causal": True,
        "sliding_window": (40, 0),
        "alignment": BOTTOM_RIGHT,
        "query_offset": 256 - q_len,
        "q_segment_ids": ids,
        "kv_segment_ids": ids,
        "cum_seqlens_q": jnp.asarray([0, q_len]),
        "cum_seqlens_k": jnp.asarray([0, 256]),
        "softmax_scale as an array": jnp.ones(()),
        "logits_soft_cap": 2.0,
        "dropout_prob": 0.1,
        "logits_dtype": jnp.bfloat16,
        "precision": jax.lax.Precision.HIGHEST,
        "chunk_sizes": eqxa.ChunkSizes(128, 128),
        "normalizer": eqxa.Entmax(),
        "differentiation": eqxa.Differentiation.BOTH,
        "return_lse": True,
    }
    return {name.partition(" ")[0]: asked[name]}


OPTIONS = (
    *("mask", "bias", "softmax_aux", "num_sink_tokens", "causal", "sliding_window"),
    *("alignment", "query_offset", "q_segment_ids", "kv_segment_ids", "cum_seqlens_q"),
    *("cum_seqlens_k", "softmax_scale as an array", "logits_soft_cap", "dropout_prob"),
    *("logits_dtype", "precision", "normalizer", "differentiation", "chunk_sizes"),
    "return_lse",
)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Tokamax leaves dtypes to JAX."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_not_stated_is_refused(backend: Backend, option: str) -> None:
    kernel = KERNELS[backend]
    dtype = jnp.float32 if "float32" in kernel.support.dtypes else jnp.bfloat16
    q_len = 128 if option == "alignment" else 256
    query = jax.ShapeDtypeStruct((2, q_len, 4, 64), dtype)
    key = jax.ShapeDtypeStruct((2, 256, 2, 64), dtype)
    request = Request.of(query, key, **asking(option, q_len))
    stated = option in kernel.support.options
    assert (kernel.refusal(request) is None) is stated
    if not stated:
        assert kernel.refusal(request) == f"it can't do {option}"


def spec(length: int, heads: int, dim: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct((2, length, heads, dim), jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("backend", "query", "key", "value", "options", "reason"),
    (
        ("cudnn", spec(8, 2, 64, "float32"), None, None, {}, "query is float32"),
        ("cudnn", spec(8, 2, 12), None, None, {}, "multiple of 8"),
        ("cudnn", spec(8, 2, 64), None, spec(8, 2, 32), {}, "value has heads of 32"),
        ("cudnn", spec(8, 2, 64), None, spec(8, 2, 64, "float16"), {}, "needs one"),
        ("cudnn", spec(8, 2, 64), None, None, {"sliding_window": (2, 1)}, "after a"),
        (
            "cudnn",
            spec(8, 2, 64),
            spec(16, 2, 64),
            None,
            {"causal": True, "alignment": BOTTOM_RIGHT},
            "top left",
        ),
        ("cudnn", spec(9, 2, 64), spec(8, 2, 64), None, {"causal": True}, "9 queries"),
        ("cudnn", spec(8, 2, 64), spec(0, 2, 64), None, {}, "no key to see"),
        (
            "fa4",
            spec(16, 2, 64),
            spec(8, 2, 64),
            None,
            {"causal": True, "alignment": BOTTOM_RIGHT},
            "no key to see",
        ),
        ("fa4", spec(8, 2, 64), spec(9, 2, 64), None, {"causal": True}, "bottom right"),
        ("fa4", spec(8, 2, 264), None, None, {}, "multiple of 8 to 256"),
        (
            "tokamax",
            spec(8, 2, 64),
            spec(16, 2, 64),
            None,
            {"causal": True, "query_offset": 8},
            "top left",
        ),
        (
            "tokamax",
            spec(8, 2, 64),
            spec(3, 2, 64),
            None,
            {"sliding_window": (2, 2)},
            "no key to see",
        ),
        ("splash", spec(100, 2, 64), None, None, {}, "multiple of 128"),
        ("splash", spec(128, 2, 96), None, None, {}, "a head is 96 wide"),
        (
            "splash",
            spec(128, 2, 64),
            None,
            None,
            {"chunk_sizes": eqxa.ChunkSizes(128, 64)},
            "chunk_sizes has 64",
        ),
        (
            "splash",
            spec(128, 2, 64),
            None,
            None,
            {"softmax_aux": jnp.zeros(1)},
            "gradient of softmax_aux",
        ),
        (
            "splash",
            spec(128, 2, 64),
            None,
            None,
            {
                "q_segment_ids": jnp.zeros((2, 128), jnp.int32),
                "kv_segment_ids": jnp.ones((2, 128), jnp.int32),
            },
            "differ",
        ),
        (
            "splash",
            spec(128, 2, 64),
            None,
            None,
            {"q_segment_ids": jnp.zeros((2, 128), jnp.int32), "query_offset": 1},
            "see itself",
        ),
        (
            "splash",
            spec(128, 2, 64),
            None,
            None,
            {"query_offset": jnp.zeros((), jnp.int32)},
            "no key to see",
        ),
    ),
)
@pytest.mark.usefixtures("standard_promotion")
def test_limits(
    backend: str, query: Any, key: Any, value: Any, options: Any, reason: str
) -> None:
    key = query if key is None else key
    value = key if value is None else value
    kernel = KERNELS[Backend(backend)]
    found = kernel.refusal(Request.of(query, key, value, **options))
    assert found is not None and reason in found, found


def test_splash_refuses_x64(x64: None) -> None:
    x = spec(128, 2, 64)
    assert "x64" in str(_splash.SPLASH.refusal(Request.of(x, x)))


@pytest.mark.parametrize("backend", KERNELS)
def test_what_is_not_here_says_so(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = spec(128, 2, 64)
    with pytest.raises(ValueError, match=rf"backend is {backend.name}, but it runs on"):
        eqxa.resolve(x, x, backend=backend)
    here = dataclasses.replace(KERNELS[backend], platform="cpu", device="cpu")
    monkeypatch.setattr("eqx_attention.kernels._kernel.is_installed", lambda _: False)
    assert here.absence() == (
        f"{here.package} is not installed: pip install {here.package}"
    )


def test_old_gpus_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def absence(kind: str, capability: str) -> str | None:
        device = SimpleNamespace(device_kind=kind, compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda: [device])
        return KERNELS[Backend.CUDNN].absence()

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert absence("NVIDIA H100", "9.0") is None
    assert absence("NVIDIA B200", "10.0") is None
    assert "compute capability of 8.0, and has 7.5" in str(
        absence("Tesla NVIDIA", "7.5")
    )
    assert "GPUs of NVIDIA" in str(absence("AMD Instinct", "9.4"))


def test_auto_takes_no_optional_package() -> None:
    assert [b for b, k in KERNELS.items() if k.automatic] == [
        Backend.CUDNN,
        Backend.SPLASH,
    ]
    assert _backend.Backend.AUTO not in KERNELS


def gradients(kernel: Kernel, arrays: Arrays, **options: Any) -> Any:
    """A function of the arrays whose gradient uses the kernel, and the arrays."""
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    request = Request.of(arrays["query"], arrays["key"], arrays["value"], **options)
    assert kernel.refusal(request) is None

    def loss(arrays: Arrays) -> Any:
        return jnp.sum(kernel(request, **arrays).astype(jnp.float32))

    return jax.value_and_grad(loss), arrays


def test_splash_lowers() -> None:
    text = lower("tpu", *gradients(_splash.SPLASH, heads(dtype=jnp.bfloat16)))
    assert text.count("tpu_custom_call") == 3


@pytest.mark.parametrize("window", (None, (20, 0)))
def test_cudnn_lowers(window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one: JAX asks for its version while tracing."""
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91100
    )
    function, arrays = gradients(
        KERNELS[Backend.CUDNN],
        heads(kv_len=256, dtype=jnp.bfloat16),
        causal=True,
        sliding_window=window,
    )
    # JAX exports no call of cuDNN, as it promises nothing of later versions.
    traced = jax.jit(function).trace(arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text
    assert "mask_type\\22: \\22CAUSAL" in text
    assert f"sliding_window_length\\22: {0 if window is None else 21}" in text


CASES: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "sliding_window": (5, 0)},
    {"sliding_window": (5, 3)},
    {"sliding_window": (None, 3)},
    {"sliding_window": (5, None), "softmax_scale": 0.3},
)


@pytest.mark.parametrize("options", CASES)
def test_tokamax(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its XLA implementation, which masks and scales as its kernels do."""
    pytest.importorskip("tokamax")
    kernel = on_cpu(_tokamax.TOKAMAX, implementation=("xla",))
    monkeypatch.setitem(KERNELS, Backend.TOKAMAX, kernel)  # pyright: ignore[reportArgumentType]  # a dict
    arrays = qkv(q_len=12, kv_len=16, qk_dim=8, v_dim=8, dtype=jnp.bfloat16)
    query, key = (jnp.asarray(arrays[name]) for name in ("query", "key"))
    assert "promotion" in str(kernel.refusal(Request.of(query, key)))
    with jax.numpy_dtype_promotion("standard"):
        check(kernel, arrays, tolerance=3e-2, logits_soft_cap=3.0, **options)


@pytest.mark.parametrize("options", CASES)
def test_fa4(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reference, which its own tests hold the kernels to."""
    pytest.importorskip("fa4_jax")
    kernel = on_cpu(_fa4.FA4, backend="reference")
    monkeypatch.setitem(KERNELS, Backend.FA4, kernel)  # pyright: ignore[reportArgumentType]  # a dict
    arrays = qkv(q_len=12, kv_len=16, qk_dim=8, v_dim=8, dtype=jnp.bfloat16)
    check(kernel, arrays, tolerance=3e-2, alignment=BOTTOM_RIGHT, **options)

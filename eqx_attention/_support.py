"""What each backend can do, as a table made from what the backends state."""

from collections.abc import Iterable, Mapping, Sequence

from ._backend import KERNELS, Backend
from .kernels._kernel import Support

_OPTIONS = (
    "causal",
    "sliding_window",
    "alignment",
    "query_offset",
    "mask",
    "bias",
    "softmax_aux",
    "num_sink_tokens",
    "sink_bias",
    "q_segment_ids",
    "kv_segment_ids",
    "cum_seqlens_q",
    "cum_seqlens_k",
    "softmax_scale as an array",
    "logits_soft_cap",
    "dropout_prob",
    "logits_dtype",
    "precision",
    "normalizer",
    "differentiation",
    "chunk_sizes",
    "return_lse",
)
_SEEN_ON = "CPU; it lowers for CUDA and TPU"


def _all_but(*names: str) -> dict[str, str]:
    return {name: "yes" for name in _OPTIONS if name not in names}


_IDS = ("q_segment_ids", "kv_segment_ids", "cum_seqlens_q", "cum_seqlens_k")
_DECODING = {
    "causal": "always",
    "alignment": "ends together",
    "query_offset": "by sequence_end",
    "chunk_sizes": "the block size is that of keys",
}
_OURS: Mapping[Backend, Support] = {
    Backend.STANDARD: Support(
        _all_but("chunk_sizes"), (), "any", "any order, both modes", _SEEN_ON
    ),
    Backend.FLASH: Support(
        _all_but(), (), "any", "any order; forward mode first with BOTH", _SEEN_ON
    ),
    Backend.RAGGED_DECODE: Support(
        {**_all_but(*_IDS, "dropout_prob", "normalizer"), **_DECODING},
        (),
        "any",
        "any order, both modes",
        _SEEN_ON,
    ),
}
SUPPORT: Mapping[Backend, Support] = _OURS | {
    backend: kernel.support for backend, kernel in KERNELS.items()
}


def markdown() -> str:
    """The page on backends, which is the same on every machine."""
    head = ("", *(f"`{backend.name}`" for backend in SUPPORT))
    rows = [
        (f"`{name}`", *(s.options.get(name, "no") for s in SUPPORT.values()))
        for name in _OPTIONS
    ]
    rows += [
        ("dtypes", *(", ".join(s.dtypes) or "any" for s in SUPPORT.values())),
        ("widths of heads", *(s.head_dims for s in SUPPORT.values())),
        ("derivatives", *(s.derivatives for s in SUPPORT.values())),
        ("was run on", *(s.seen_on for s in SUPPORT.values())),
    ]
    return f"{_PAGE}\n{table(head, rows)}\n"


def taken(support: Support) -> str:
    """The options that a backend takes, or the fewer that it does not."""
    missing = [name for name in _OPTIONS if name not in support.options]
    if len(missing) < len(support.options):
        return f"all but {', '.join(missing)}" if missing else "all"
    return ", ".join(support.options)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines
    )


_PAGE = """\
# What each backend can do

Made by `python -m eqx_attention --markdown` from what the backends state of
themselves. `python -m eqx_attention` tells what a machine has, and what AUTO takes
there.

The first three are this package's own. The others hand over to a library. They
compute the same, or refuse with the reason: "no" is an error, never silence. Beside
what the table says, the libraries' kernels refuse a query that the band leaves
without a key, dtypes that differ, and second derivatives. Keys that no query may see
may hold NaN for them too: they are made 0 before.

**None of the libraries' kernels was ever run on its device by this package**, and no
speed is claimed. The last row says what was done instead.

AUTO takes `CUDNN` or `SPLASH` in the place of flash attention, on a machine with one
such device, if it can do all that is asked. With several devices, or within
`jax.shard_map`, it takes neither, as it can't be seen while tracing how arrays are
divided: ask for one then (`SPLASH` needs `jax.shard_map(..., check_vma=False)`). Nor
can it be seen that a second derivative will be taken: ask for `FLASH` then. Of itself
it never takes `TOKAMAX` (`pip install tokamax`) or `FA4` (`pip install
"fa4-jax[cu13]"`).

- `CUDNN`: by way of `jax.nn.dot_product_attention`. With its masks and biases a row
  that is masked everywhere is a mean, and its lse has no gradient.
- `SPLASH`: JAX's Pallas kernels for TPUs. Lengths are multiples of 128. The query is
  scaled in its own dtype, which rounds it once more if the scale is no power of two.
  It does not trace with x64 on.
- `TOKAMAX`: its kernels `mosaic` and `triton`. It does not trace with
  `jax_numpy_dtype_promotion="strict"`.
- `FA4`: the package fa4-jax, for Python 3.12 or newer. Its band ends at the bottom
  right.
"""

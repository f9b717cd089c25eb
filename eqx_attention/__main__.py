"""Tells what this package can do on this machine: `python -m eqx_attention`.

With `--markdown`, what each backend can do anywhere, as docs/backends.md has it.
"""

import argparse
import platform

import jax
import jax.numpy as jnp

from . import _tuning_cache as cache
from ._backend import KERNELS, Backend, resolve
from ._request import device_kind, versions
from ._support import SUPPORT, markdown, table, taken
from .functional._options import CommonOptions

_SHAPES: tuple[tuple[str, int, str, CommonOptions], ...] = (
    ("short", 256, "float32", {}),
    ("causal, float32", 4096, "float32", {"causal": True}),
    ("causal, bfloat16", 4096, "bfloat16", {"causal": True}),
    ("window", 8192, "bfloat16", {"causal": True, "sliding_window": (256, 0)}),
    ("soft cap", 4096, "bfloat16", {"causal": True, "logits_soft_cap": 30.0}),
)


def main() -> None:
    """Prints the one or the other."""
    parser = argparse.ArgumentParser(
        prog="python -m eqx_attention", description=__doc__
    )
    parser.add_argument("--markdown", action="store_true", help="the page on backends")
    print(markdown() if parser.parse_args().markdown else _machine(), end="")


def _machine() -> str:
    backends = [
        (backend.name, _availability(backend), taken(support))
        for backend, support in SUPPORT.items()
    ]
    choices = [_choice(*shape) for shape in _SHAPES]
    tuned = cache.table_of_file()
    here = sum(key.startswith(f"{device_kind()}; ") for key in tuned)
    return "\n\n".join(
        (
            f"Python {platform.python_version()}, {', '.join(versions())}",
            f"{jax.device_count()} x {device_kind()}",
            table(("backend", "here", "takes"), backends),
            "What AUTO takes, of 8 heads of 64:",
            table(("", "length", "backend", "chunks", "why"), choices),
            f"Tuned: {len(tuned)} entries, {here} of this kind of device, in "
            f"{cache.cache_path() or 'no file, as the cache is off'}\n",
        )
    )


def _availability(backend: Backend) -> str:
    kernel = KERNELS.get(backend)
    return ("yes" if kernel is None else kernel.absence()) or "yes"


def _choice(name: str, length: int, dtype: str, options: CommonOptions) -> list[str]:
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.dtype(dtype))
    choice = resolve(x, x, x, **options)
    sizes = choice.chunk_sizes
    chunks = "-"
    if sizes is not None:
        chunks = f"{sizes.query} x {sizes.key} ({choice.origin})"
    return [name, str(length), choice.backend.name, chunks, choice.reason]


if __name__ == "__main__":
    main()

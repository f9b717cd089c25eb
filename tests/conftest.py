"""Settings that every test runs under, and the fixtures that all of them share."""

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from importlib import metadata

# Read when JAX starts: eight devices, so that sharding is tested on any machine; and no
# optimising, as compiling is most of what a test costs. The last of the flags takes two
# thirds off that where JAX still knows it.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false"
        if metadata.version("jaxlib") == "0.10.2"
        else "",
    )
)
# What was tuned on this machine is not to change what the tests run.
os.environ["EQX_ATTENTION_CACHE_DIR"] = "off"

import equinox as eqx
import hypothesis
import jax
import pytest
from jaxtyping import PRNGKeyArray

jax.config.update("jax_numpy_dtype_promotion", "strict")  # pyright: ignore[reportUnknownMemberType]  # has no types
jax.config.update("jax_numpy_rank_promotion", "raise")  # pyright: ignore[reportUnknownMemberType]  # has no types

# The same examples in every run; a first one that compiles may take its time.
hypothesis.settings.register_profile(
    "project", database=None, deadline=None, derandomize=True
)
hypothesis.settings.load_profile("project")

# These need the weights, which `nox -s real_models` installs.
collect_ignore = [] if os.environ.get("EQX_ATTENTION_REAL") else ["real"]


@pytest.fixture
def getkey() -> Callable[[], PRNGKeyArray]:
    """Returns a new PRNG key at each call, the same ones in every run."""
    seeds = itertools.count()
    return lambda: jax.random.key(next(seeds))


@pytest.fixture
def x64() -> Iterator[None]:
    """Turns on 64-bit types for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", autouse=True)
def clear_caches() -> Iterator[None]:
    """Forgets what a module compiled: over a whole run it would fill the memory."""
    yield
    eqx.clear_caches()
    jax.clear_caches()
    gc.collect()

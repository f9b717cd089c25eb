"""The switch of the debugging mode, read before any other file is imported."""

import os

DEBUG = os.environ.get("EQX_ATTENTION_DEBUG", "0").lower() not in ("", "0", "false")
"""True in the debugging mode: every function is type-checked, and values too."""

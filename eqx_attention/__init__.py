"""Attention for models in Equinox: exact, differentiable, on any device."""

from contextlib import nullcontext as _nullcontext

from jaxtyping import install_import_hook as _install_import_hook

from ._debug import DEBUG as _DEBUG
from ._version import VERSION as _VERSION

# In the debugging mode every function and every module field is checked as well. The
# hook has to be in place before the files are imported.
with (
    _install_import_hook("eqx_attention", "beartype.beartype")
    if _DEBUG
    else _nullcontext()
):
    from . import masks as masks, scores as scores
    from ._attention import Attention as Attention, attention as attention
    from ._backend import (
        Backend as Backend,
        Resolution as Resolution,
        resolve as resolve,
    )
    from ._cache import KVCache as KVCache
    from ._config import (
        Alignment as Alignment,
        AttentionConfig as AttentionConfig,
        ChunkSizes as ChunkSizes,
        Differentiation as Differentiation,
        default_chunk_sizes as default_chunk_sizes,
    )
    from ._latent import MultiheadLatentAttention as MultiheadLatentAttention
    from ._multihead import (
        MultiheadAttention as MultiheadAttention,
        ProjectedKV as ProjectedKV,
    )
    from ._normalizer import Entmax as Entmax, Softmax as Softmax
    from ._paged_cache import PagedKVCache as PagedKVCache
    from ._rolling_cache import RollingKVCache as RollingKVCache
    from ._rotary import (
        LinearScaling as LinearScaling,
        Llama3Scaling as Llama3Scaling,
        NTKScaling as NTKScaling,
        RotaryEmbedding as RotaryEmbedding,
        YaRNScaling as YaRNScaling,
    )
    from .functional._flash import flash_attention as flash_attention
    from .functional._paged_decode import (
        paged_decode_attention as paged_decode_attention,
    )
    from .functional._partial import (
        PartialAttention as PartialAttention,
        merge_attention as merge_attention,
    )
    from .functional._ragged_decode import (
        ragged_decode_attention as ragged_decode_attention,
    )
    from .functional._standard import standard_attention as standard_attention

__version__ = _VERSION

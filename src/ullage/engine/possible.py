"""Whether a decoder can be served as asked, told from its configuration and the options alone.

Imports no torch and reads no weights, so that `ullage serve` can refuse at once.
"""

from __future__ import annotations

from ullage.anatomy.spec import ModelSpec
from ullage.engine.model.support import kv_shapes, require_supported, windows
from ullage.engine.options import EngineOptions, kv_blocks


def require_possible(spec: ModelSpec, options: EngineOptions) -> int:
    """The longest length to serve, in tokens.

    Raises BadUsage for a length that is not the model's and for KV memory that does not hold one
    request of it, UnsupportedModel for a spec that the engine would not run exactly.
    """
    max_model_len = options.resolve_max_model_len(spec)
    require_supported(spec, max_model_len)
    kv_blocks(kv_shapes(spec), windows(spec, max_model_len), options, max_model_len)
    return max_model_len

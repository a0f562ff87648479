"""The decoder that a spec configures, and its layers as plain data.

`Decoder` runs, `Layer` is what it runs over, `kv_shapes` and `windows` are what the cache needs to
know of it.
"""

from __future__ import annotations

from ullage.engine.model.decoder import Decoder, kv_shapes, windows
from ullage.engine.model.layer import ACTIVATIONS, Dense, Layer
from ullage.engine.model.norms import Norm

__all__ = ["ACTIVATIONS", "Decoder", "Dense", "Layer", "Norm", "kv_shapes", "windows"]

"""What a model is: config.json, safetensors and GGUF headers → `ModelSpec`, `CheckpointIndex`.

`load(path)` is the one door; the nouns are in `spec.py` and `checkpoint.py`.
"""

from __future__ import annotations

from ullage.anatomy.config.read import read_config
from ullage.anatomy.open import Model, ModelFiles, load, open_model

__all__ = ["Model", "ModelFiles", "load", "open_model", "read_config"]

"""The KV cache: blocks of storage (`cache`) and how numbers are coded in it (`codecs`)."""

from __future__ import annotations

from ullage.engine.kv.cache import KVCache, slot_shapes
from ullage.engine.kv_formats import FLOAT32, KV_FORMATS, KVFormat, KVShape

__all__ = ["FLOAT32", "KV_FORMATS", "KVCache", "KVFormat", "KVShape", "slot_shapes"]

"""What the headers of a GGUF model say, checked, and the configuration that grows out of it.

Holds `Facts`, which the readers in `config.py` and `adjustments.py` fill. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from ullage.anatomy.files.json_scan import excerpt
from ullage.anatomy.gguf.architectures import GGUF_ARCHITECTURES, GgufArchitecture
from ullage.anatomy.gguf.header import GgufArray, GgufHeader, GgufValue
from ullage.errors import MalformedCheckpoint, UnsupportedModel

# Keys that may differ from layer to layer, because an adjustment below reads them.
_PER_LAYER = {"lfm2": ("attention.head_count_kv",)}


class Facts:
    """What the headers say, and the configuration that grows out of it."""

    def __init__(self, headers: Sequence[GgufHeader]) -> None:
        first = headers[0]
        self.file = first.file
        self.metadata = first.metadata
        self.big_endian = first.byte_order == "big"
        self.tensors = {t.name: t for header in headers for t in header.tensors}
        self.config: dict[str, object] = {}
        self.sources: dict[str, str] = {}
        architecture = first.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise MalformedCheckpoint(
                f"{architecture!r}", file=self.file, field="general.architecture", expected="a name"
            )
        self.architecture = architecture
        row = GGUF_ARCHITECTURES.get(architecture)
        if row is None:
            raise UnsupportedModel(
                f"the GGUF architecture {excerpt(architecture)} is not known here",
                file=self.file,
                field="general.architecture",
                expected="one of " + ", ".join(sorted(GGUF_ARCHITECTURES)),
            )
        self.row: GgufArchitecture = row

    def put(self, key: str, value: object, source: str) -> None:
        self.config[key] = value
        self.sources[key] = source

    def drop(self, key: str) -> None:
        self.config.pop(key, None)
        self.sources.pop(key, None)

    def raw(self, suffix: str) -> GgufValue | None:
        return self.metadata.get(f"{self.architecture}.{suffix}")

    def scalar(self, suffix: str) -> int | float | bool | None:
        """The number `suffix`; an array counts when all layers agree. None when absent."""
        value = self.raw(suffix)
        if isinstance(value, tuple) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, tuple) and suffix in _PER_LAYER.get(self.architecture, ()):
            return None
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str | GgufArray):
            raise self.contradiction(suffix, f"{value!s}", "a number")
        if isinstance(value, tuple):
            raise UnsupportedModel(
                "values that differ from layer to layer",
                file=self.file,
                field=f"{self.architecture}.{suffix}",
                expected="one value, for this architecture",
            )
        if not 0 <= value < 2**40:  # also what is not a number
            raise self.contradiction(suffix, f"{value}", "a number from 0 to 2^40")
        return value

    def whole(self, suffix: str) -> int | None:
        value = self.scalar(suffix)
        if value is None or type(value) is int:
            return value
        raise self.contradiction(suffix, f"{value}", "a whole number")

    def required(self, suffix: str) -> int:
        value = self.whole(suffix)
        if not value:
            raise self.contradiction(suffix, "nothing" if value is None else "0", "a whole number")
        return value

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.shape

    def layer_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of `blk.N.name` in the first layer that has one."""
        for layer in range(self.num_layers()):
            shape = self.shape(f"blk.{layer}.{name}")
            if shape is not None:
                return shape
        return None

    def num_layers(self) -> int:
        return int(self.required("block_count"))

    def contradiction(self, suffix: str, found: str, expected: str) -> MalformedCheckpoint:
        return MalformedCheckpoint(
            found, file=self.file, field=f"{self.architecture}.{suffix}", expected=expected
        )

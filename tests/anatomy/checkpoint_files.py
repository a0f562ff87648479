"""Builders of small checkpoint files, right and wrong, byte by byte.

They share no code with the readers under test, nor with the libraries that serve as oracles.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

LENGTHS = {"U8": 8, "F4": 4, "F16": 16, "BF16": 16, "F32": 32, "I64": 64, "F8_E4M3": 8}


def header_of(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[dict[str, object], int]:
    """A safetensors header for tensors laid out in order, and the bytes of their data."""
    header: dict[str, object] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        bits = LENGTHS[dtype]
        for size in shape:
            bits *= size
        end = position + bits // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return header, position


def safetensors_bytes(header: object, data_bytes: int, *, length: int | None = None) -> bytes:
    """A file of a header (an object, or raw bytes) and zeros. `length` lies about the header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    said = len(raw) if length is None else length
    return struct.pack("<Q", said) + raw + bytes(data_bytes)


def write_safetensors(file: Path, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Path:
    file.write_bytes(safetensors_bytes(*header_of(tensors)))
    return file


# --- GGUF ----------------------------------------------------------------------------------------

CODES = {
    "uint8": (0, "B"),
    "int8": (1, "b"),
    "uint16": (2, "H"),
    "int16": (3, "h"),
    "uint32": (4, "I"),
    "int32": (5, "i"),
    "float32": (6, "f"),
    "bool": (7, "?"),
    "uint64": (10, "Q"),
    "int64": (11, "q"),
    "float64": (12, "d"),
}
BLOCKS = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_1": (3, 32, 20), "Q8_0": (8, 32, 34)}

Value = tuple[str, object]


class GgufBuilder:
    """Packs a GGUF file. Values are (kind, value); an array's kind is `[element kind]`."""

    def __init__(self, *, order: str = "<", version: int = 3, alignment: int = 32) -> None:
        self.order = order
        self.version = version
        self.alignment = alignment

    def string(self, text: str | bytes) -> bytes:
        raw = text.encode() if isinstance(text, str) else text
        return struct.pack(self.order + "Q", len(raw)) + raw

    def value(self, kind: str, value: object) -> bytes:
        """The value's kind and bytes, as they follow a key."""
        if kind.startswith("["):
            return struct.pack(self.order + "I", 9) + self.elements(kind[1:-1], value)
        if kind == "string":
            return struct.pack(self.order + "I", 8) + self.string(str(value))
        number, code = CODES[kind]
        return struct.pack(f"{self.order}I{code}", number, value)

    def elements(self, kind: str, values: object) -> bytes:
        """An array's element kind, count and elements."""
        assert isinstance(values, list | tuple)
        number = 8 if kind == "string" else 9 if kind.startswith("[") else CODES[kind][0]
        head = struct.pack(self.order + "IQ", number, len(values))
        if kind == "string":
            return head + b"".join(self.string(text) for text in values)
        if kind.startswith("["):
            return head + b"".join(self.elements(kind[1:-1], value) for value in values)
        return head + struct.pack(f"{self.order}{len(values)}{CODES[kind][1]}", *values)

    def head(self, num_tensors: int, num_keys: int) -> bytes:
        return b"GGUF" + struct.pack(self.order + "IQQ", self.version, num_tensors, num_keys)

    def info(self, name: str, sizes: Sequence[int], number: int, offset: int) -> bytes:
        """One tensor's entry; `sizes` in GGUF's order, fastest first."""
        return (
            self.string(name)
            + struct.pack(f"{self.order}I{len(sizes)}Q", len(sizes), *sizes)
            + struct.pack(self.order + "IQ", number, offset)
        )

    def file(
        self,
        metadata: Mapping[str, Value],
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        data: Mapping[str, bytes] | None = None,
    ) -> bytes:
        """A whole valid file. Shapes are row-major, as everywhere outside GGUF."""
        body = b"".join(self.string(key) + self.value(*value) for key, value in metadata.items())
        position, infos, blobs = 0, b"", []
        for name, (kind, shape) in tensors.items():
            number, block, block_bytes = BLOCKS[kind]
            elements = 1
            for size in shape:
                elements *= size
            infos += self.info(name, list(shape)[::-1], number, position)
            num_bytes = elements // block * block_bytes
            padded = -(-num_bytes // self.alignment) * self.alignment
            blobs.append((data or {}).get(name, bytes(num_bytes)).ljust(padded, b"\0"))
            position += padded
        start = self.head(len(tensors), len(metadata)) + body + infos
        return start.ljust(-(-len(start) // self.alignment) * self.alignment, b"\0") + b"".join(
            blobs
        )


def llama_gguf(
    num_layers: int = 2,
    *,
    extra: Mapping[str, Value] | None = None,
    extra_tensors: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    data: Mapping[str, bytes] | None = None,
) -> bytes:
    """A tiny llama: width 64, 4 heads of 16, 2 KV heads, MLP 96, 50 tokens, tied."""
    metadata: dict[str, Value] = {
        "general.architecture": ("string", "llama"),
        "llama.block_count": ("uint32", num_layers),
        "llama.context_length": ("uint32", 128),
        "llama.embedding_length": ("uint32", 64),
        "llama.feed_forward_length": ("uint32", 96),
        "llama.attention.head_count": ("uint32", 4),
        "llama.attention.head_count_kv": ("uint32", 2),
        "llama.attention.layer_norm_rms_epsilon": ("float32", 1e-5),
        "llama.rope.dimension_count": ("uint32", 16),
        "llama.rope.freq_base": ("float32", 10000.0),
        "tokenizer.ggml.tokens": ("[string]", [f"t{i}" for i in range(50)]),
        **(extra or {}),
    }
    tensors: dict[str, tuple[str, Sequence[int]]] = {
        "token_embd.weight": ("Q8_0", (50, 64)),
        "output_norm.weight": ("F32", (64,)),
    }
    for layer in range(num_layers):
        for name, kind, shape in (
            ("attn_norm", "F32", (64,)),
            ("attn_q", "Q4_1", (64, 64)),
            ("attn_k", "Q4_1", (32, 64)),
            ("attn_v", "Q8_0", (32, 64)),
            ("attn_output", "Q4_1", (64, 64)),
            ("ffn_norm", "F32", (64,)),
            ("ffn_gate", "Q4_1", (96, 64)),
            ("ffn_up", "Q4_1", (96, 64)),
            ("ffn_down", "Q4_1", (64, 96)),
        ):
            tensors[f"blk.{layer}.{name}.weight"] = (kind, shape)
    tensors.update(extra_tensors or {})
    return GgufBuilder().file(metadata, tensors, data)

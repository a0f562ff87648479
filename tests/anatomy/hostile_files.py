"""Reads one crafted file under a memory limit and prints what happened: run by test_hostile.py.

Each case runs in a process of its own, since only a process can be held to a limit of memory.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import tempfile
import time
from pathlib import Path

from checkpoint_files import GgufBuilder

from ullage.anatomy.files.index import read_checkpoint
from ullage.anatomy.gguf.header import read_gguf
from ullage.errors import BadInput

LIMIT_BYTES = 500 * 2**20
B = GgufBuilder()
MB = 10**6


def _safetensors(raw: bytes, data_bytes: int = 0) -> bytes:
    return struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)


def _key_value(kind: int, payload: bytes) -> bytes:
    return B.head(0, 1) + B.string("k") + struct.pack("<I", kind) + payload


def _many_tensors(count: int) -> bytes:
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return _safetensors(("{" + ",".join(f'"{i}":{entry}' for i in range(count)) + "}").encode())


def _sparse(folder: Path, head: bytes, size: int) -> Path:
    file = folder / "m.gguf"
    with file.open("wb") as stream:
        stream.write(head)
        stream.truncate(size)
    return file


def _file(folder: Path, name: str, raw: bytes) -> Path:
    (folder / name).write_bytes(raw)
    return folder / name


CASES = {
    "safetensors: 99 MB of small objects": lambda d: _file(
        d, "m.safetensors", _safetensors(b'{"a":[' + b"{}," * (33 * MB) + b"{}]}")
    ),
    "safetensors: 99 MB of small lists in metadata": lambda d: _file(
        d, "m.safetensors", _safetensors(b'{"__metadata__":{"a":[' + b"[]," * (33 * MB) + b"1]}}")
    ),
    "safetensors: 99 MB of metadata keys": lambda d: _file(
        d,
        "m.safetensors",
        _safetensors(
            b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(7 * MB)) + b"}}"
        ),
    ),
    "safetensors: a million empty tensors": lambda d: _file(d, "m.safetensors", _many_tensors(MB)),
    "safetensors: brackets 100,000 deep": lambda d: _file(
        d, "m.safetensors", _safetensors(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    ),
    "safetensors: braces 30 million deep": lambda d: _file(
        d, "m.safetensors", _safetensors(b'{"a":' * (20 * MB))
    ),
    "safetensors: a string of 99 MB of escapes": lambda d: _file(
        d, "m.safetensors", _safetensors(b'{"' + b"\\n" * (49 * MB) + b'":1}')
    ),
    "safetensors: 99 MB of spaces": lambda d: _file(
        d, "m.safetensors", _safetensors(b"{" + b" " * (99 * MB) + b"}")
    ),
    "safetensors: 3,000 digits": lambda d: _file(
        d,
        "m.safetensors",
        _safetensors(b'{"a":{"dtype":"U8","shape":[' + b"9" * 3000 + b'],"data_offsets":[0,1]}}'),
    ),
    "safetensors: 99 MB of digits": lambda d: _file(
        d,
        "m.safetensors",
        _safetensors(
            b'{"a":{"dtype":"U8","shape":[' + b"9" * (99 * MB) + b'],"data_offsets":[0]}}'
        ),
    ),
    "index: 120 MB of small objects": lambda d: _file(
        d,
        "model.safetensors.index.json",
        b'{"weight_map":{},"metadata":{"a":[' + b"{}," * (40 * MB) + b"{}]}}",
    ),
    "index: brackets 100,000 deep": lambda d: _file(
        d, "model.safetensors.index.json", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    ),
    "index: deep in metadata": lambda d: _file(
        d, "model.safetensors.index.json", b'{"metadata":' + b'{"a":' * 100_000
    ),
    "index: two million tensors": lambda d: _file(
        d,
        "model.safetensors.index.json",
        b'{"weight_map":{' + b",".join(b'"%d":"a.safetensors"' % i for i in range(2 * MB)) + b"}}",
    ),
    "gguf: 1 TB of empty strings": lambda d: _sparse(
        d, _key_value(9, struct.pack("<IQ", 8, 2**36)), 2**40
    ),
    "gguf: 1 TB of empty arrays": lambda d: _sparse(
        d, _key_value(9, struct.pack("<IQ", 9, 2**36)), 2**40
    ),
    "gguf: 1 TB, a million tensors": lambda d: _sparse(d, B.head(MB, 0), 2**40),
    "gguf: 1 TB, 65,000 tensors": lambda d: _sparse(
        d, B.head(65_000, 0) + b"".join(B.info(f"{i}", [], 0, 0) for i in range(65_000)), 2**40
    ),
    "gguf: 1 TB, every key": lambda d: _sparse(d, B.head(0, 60_000), 2**40),
    "gguf: nested 10,000 deep": lambda d: _file(
        d, "m.gguf", _key_value(9, struct.pack("<IQ", 9, 1) * 10_000)
    ),
    "gguf: 2 million strings": lambda d: _sparse(
        d, _key_value(9, struct.pack("<IQ", 8, 2 * MB)), 100 * MB
    ),
    "gguf: a string of 400 MB": lambda d: _sparse(
        d, _key_value(8, struct.pack("<Q", 400 * MB)), 500 * MB
    ),
    "gguf: 400 MB of numbers": lambda d: _sparse(
        d, _key_value(9, struct.pack("<IQ", 0, 400 * MB)), 500 * MB
    ),
}


def main(case: str) -> None:
    """Prints {"error": the sentence or null, "seconds", "peak_bytes"} as JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make = CASES[case]
        file = make(folder)
        # Building the file may take more than reading it: count from a clean page.
        Path("/proc/self/clear_refs").write_text("5")
        resource.setrlimit(resource.RLIMIT_AS, (4 * LIMIT_BYTES, 4 * LIMIT_BYTES))
        started, error = time.process_time(), None
        try:
            if file.suffix == ".gguf":
                read_gguf(file)
            else:
                read_checkpoint(file)
        except BadInput as bad:
            error = str(bad)
        seconds = time.process_time() - started
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(
        json.dumps({"error": error, "seconds": seconds, "peak_bytes": int(peak.split()[1]) * 1024})
    )


if __name__ == "__main__":
    main(sys.argv[1])

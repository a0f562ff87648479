"""Reads one crafted adapter under a memory limit and prints what happened: see test_hostile.py.

Each case runs in a process of its own, since only a process can be held to a limit of memory.
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from ullage.anatomy.adapters.read import read_adapter
from ullage.errors import UllageError

LIMIT_BYTES = 500 * 2**20
MARK = Path(tempfile.gettempdir()) / "ullage-hostile-pickle-ran"
LORA: dict[str, object] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q"]}
KEY = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


def _safetensors(raw: bytes, data_bytes: int = 0) -> bytes:
    return struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)


def _entry(shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def _sound() -> bytes:
    header = {
        KEY.format(0, "A"): _entry([4, 8], 0, 128),
        KEY.format(0, "B"): _entry([8, 4], 128, 256),
    }
    return _safetensors(json.dumps(header).encode(), 256)


def adapter(
    folder: Path,
    weights: bytes | None = None,
    *,
    config: str | None = None,
    name: str = "adapter_model.safetensors",
    **fields: object,
) -> Path:
    text = json.dumps({**LORA, **fields}) if config is None else config
    (folder / "adapter_config.json").write_text(text)
    (folder / name).write_bytes(_sound() if weights is None else weights)
    return folder


def _many_keys(folder: Path, count: int) -> Path:
    """`count` keys, each of an empty tensor, as compactly as the format allows."""
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(f'"{i:x}":{entry}' for i in range(count)) + "}"
    return adapter(folder, _safetensors(text.encode()))


def _many_modules(folder: Path, count: int) -> Path:
    header: dict[str, object] = {}
    for index in range(count):
        for letter in "AB":
            begin = 16 * len(header)
            header[KEY.format(index, letter)] = _entry([2, 2], begin, begin + 16)
    return adapter(
        folder, _safetensors(json.dumps(header, separators=(",", ":")).encode(), 32 * count)
    )


def _sparse(folder: Path, head: bytes, size: int) -> Path:
    adapter(folder, head)
    with (folder / "adapter_model.safetensors").open("r+b") as stream:
        stream.truncate(size)
    return folder


def _index(folder: Path, files: dict[str, str]) -> Path:
    adapter(
        folder,
        json.dumps({"weight_map": files}).encode(),
        name="adapter_model.safetensors.index.json",
    )
    return folder


def _link(folder: Path, name: str, target: Path) -> Path:
    adapter(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(target)
    return folder


class _Runs:
    def __init__(self, module: str, attribute: str, *arguments: object) -> None:
        self.call = (module, attribute)
        self.arguments = arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        module, attribute = self.call
        return getattr(__import__(module), attribute), self.arguments


def _zipped(payload: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/version", "3")
    return file.getvalue()


def _pickled(folder: Path, value: object, *, zipped: bool = True, name: str = "bin") -> Path:
    payload = pickle.dumps(value, protocol=2)
    return adapter(folder, _zipped(payload) if zipped else payload, name=f"adapter_model.{name}")


def _tensor_pickle(size: str, number: int, *, kind: str = "FloatStorage") -> bytes:
    """The opcodes of {"x.lora_A.weight": tensor}, with the given sizes and storage length."""
    return (
        b"\x80\x02}X\x0f\x00\x00\x00x.lora_A.weight"
        b"ctorch._utils\n_rebuild_tensor_v2\n(("
        b"X\x07\x00\x00\x00storagectorch\n" + kind.encode() + b"\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpuI" + str(number).encode() + b"\ntQI0\n(" + size.encode() + b"t(t\x89"
        b"ccollections\nOrderedDict\n)RtRs."
    )


def _bomb(folder: Path) -> Path:
    """A list of lists of lists: small as a pickle, 2^60 elements when written out."""
    value: list[object] = ["a"]
    for _ in range(60):
        value = [value, value]
    return _pickled(folder, {"x": value})


CASES: dict[str, Callable[[Path], Path]] = {
    "keys: ten million": lambda d: _sparse(d, struct.pack("<Q", 480 * 10**6) + b'{"', 500 * 10**6),
    "keys: ten million in an index": lambda d: adapter(
        d,
        b'{"weight_map":{' + b'"a":"b.safetensors",' * 6 * 10**6 + b'"a":"b.safetensors"}}',
        name="adapter_model.safetensors.index.json",
    ),
    "keys: millions in a pickle": lambda d: adapter(
        d,
        _zipped(b"\x80\x02}" + b"X\x01\x00\x00\x00aNs" * 3 * 10**6 + b"."),
        name="adapter_model.bin",
    ),
    "keys: commas": lambda d: adapter(
        d,
        _safetensors(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' + b"," * 10**7 + b"}"),
    ),
    "keys: 1.9 million": lambda d: _many_keys(d, 1_900_000),
    "keys: 300,000": lambda d: _many_keys(d, 300_000),
    "keys: a name of 90 MB": lambda d: adapter(
        d,
        _safetensors(
            b'{"' + b"a." * (45 * 10**6) + b'lora_A.weight":{"dtype":"U8","shape":[0],'
            b'"data_offsets":[0,0]}}'
        ),
    ),
    "header: claims more than the file": lambda d: adapter(d, struct.pack("<Q", 2**40) + b"{}"),
    "header: offsets beyond the file": lambda d: adapter(
        d, _safetensors(json.dumps({"a.lora_A.weight": _entry([4, 8], 0, 128)}).encode(), 12)
    ),
    "header: overlapping tensors": lambda d: adapter(
        d,
        _safetensors(
            json.dumps({n: _entry([4, 8], 0, 128) for n in ("a.lora_A", "b.lora_A")}).encode(), 128
        ),
    ),
    "header: a shape that does not fit its bytes": lambda d: adapter(
        d, _safetensors(json.dumps({"a.lora_A.weight": _entry([4, 9], 0, 128)}).encode(), 128)
    ),
    "header: a key given twice": lambda d: adapter(
        d,
        _safetensors(
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
            b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
        ),
    ),
    "header: nested deeply": lambda d: adapter(d, _safetensors(b'{"a":' * 100_000)),
    "index: a shard above the directory": lambda d: _index(d, {"a": "../other.safetensors"}),
    "index: an absolute shard": lambda d: _index(d, {"a": "/etc/passwd"}),
    "index: a shard of another kind": lambda d: _index(d, {"a": "adapter_model.bin"}),
    "index: no shard is there": lambda d: _index(
        d, {"a": "adapter_model-00001-of-00001.safetensors"}
    ),
    "index: a shard that links out": lambda d: (
        _link(d, "adapter_model.safetensors", Path("/etc/hostname")),
        (d / "adapter_model.safetensors").rename(d / "adapter_model-00001-of-00001.safetensors"),
        _index(d, {"a": "adapter_model-00001-of-00001.safetensors"}),
    )[2],
    "shards: a billion of them": lambda d: adapter(
        d, name="adapter_model-00001-of-99999.safetensors"
    ),
    "links: weights out of the directory": lambda d: _link(
        d, "adapter_model.safetensors", Path("/etc/hostname")
    ),
    "links: a configuration out of the directory": lambda d: _link(
        d, "adapter_config.json", Path("/etc/hostname")
    ),
    "links: to itself": lambda d: _link(d, "adapter_config.json", d / "adapter_config.json"),
    "links: a device": lambda d: _link(d, "adapter_model.safetensors", Path("/dev/zero")),
    "pickle: runs a command": lambda d: _pickled(d, {"a": _Runs("os", "system", f"touch {MARK}")}),
    "pickle: runs a command, bare": lambda d: _pickled(
        d, {"a": _Runs("os", "system", f"touch {MARK}")}, zipped=False, name="pt"
    ),
    "pickle: evaluates": lambda d: _pickled(
        d, {"a": _Runs("builtins", "eval", f"open({str(MARK)!r}, 'w')")}
    ),
    "pickle: a class that nobody knows": lambda d: _pickled(
        d, {"a": _Runs("fractions", "Fraction", 1, 2)}
    ),
    "pickle: no dict": lambda d: _pickled(d, [1, 2, 3]),
    "pickle: lists of lists": _bomb,
    "pickle: nested deeply": lambda d: adapter(
        d, b"\x80\x02" + b"]" * 400_000 + b"a" * 399_999 + b".", name="adapter_model.bin"
    ),
    "pickle: cut off": lambda d: adapter(
        d, _zipped(pickle.dumps({"a": list(range(1000))})[:-40]), name="adapter_model.bin"
    ),
    "pickle: no zip after all": lambda d: adapter(
        d, b"PK\3\4" + bytes(100), name="adapter_model.bin"
    ),
    "pickle: a zip that unpacks to 4 GB": lambda d: adapter(
        d, _zip_bomb(4 << 30), name="adapter_model.bin"
    ),
    "pickle: more data than the file": lambda d: adapter(
        d, _zipped(_tensor_pickle("I1000000\nI1000000\n", 10**12)), name="adapter_model.bin"
    ),
    "pickle: a tensor larger than its storage": lambda d: adapter(
        d, _zipped(_tensor_pickle("I1000000\nI1000000\n", 4)), name="adapter_model.bin"
    ),
    "pickle: a negative size": lambda d: adapter(
        d, _zipped(_tensor_pickle("I-4\nI4\n", 16)), name="adapter_model.bin"
    ),
    "pickle: a type that nobody knows": lambda d: adapter(
        d, _zipped(_tensor_pickle("I2\nI2\n", 4, kind="QUInt8Storage")), name="adapter_model.bin"
    ),
    "config: huge": lambda d: adapter(
        d, config='{"peft_type":"LORA","a":"' + "x" * (200 << 20) + '"}'
    ),
    "config: nested deeply": lambda d: adapter(d, config='{"a":' * 500_000),
    "config: a key given twice": lambda d: adapter(d, config='{"r":8,"r":16,"lora_alpha":1}'),
    "config: NaN": lambda d: adapter(d, config='{"peft_type":"LORA","r":8,"lora_alpha":NaN}'),
    "config: infinite": lambda d: adapter(d, lora_alpha=float("inf")),
    "config: a negative rank": lambda d: adapter(d, r=-8),
    "config: a huge rank": lambda d: adapter(d, r=10**40),
    "config: an alpha without end": lambda d: adapter(d, lora_alpha=-1e300),
    "config: a list": lambda d: adapter(d, config="[1, 2]"),
    "config: no UTF-8": lambda d: ((adapter(d) / "adapter_config.json").write_bytes(b"\xff"), d)[1],
    "pattern: no expression": lambda d: adapter(d, rank_pattern={"(": 8}),
    "pattern: looks back": lambda d: adapter(d, rank_pattern={"(?<=a)b": 8}),
    "pattern: 10,000 shapes": lambda d: adapter(
        d, rank_pattern={"a" * (i % 100) + "." + "b" * (i // 100): 8 for i in range(10_000)}
    ),
}
# What is odd but sound: it must be read, in the same bounds.
SOUND: dict[str, Callable[[Path], Path]] = {
    "a sound adapter": adapter,
    "pattern: runs away in a backtracking engine": lambda d: adapter(
        d, rank_pattern={"(a+)+b": 8, "(.*)*x": 8, "(_|[^x]|.)*_proX": 16, ".*" * 40 + "x": 2}
    ),
    "config: millions of objects": lambda d: adapter(
        d, config='{"peft_type":"LORA","a":[' + "{}," * 1_300_000 + "{}]}"
    ),
    "30,000 modules": lambda d: _many_modules(d, 30_000),
    "pickle: a sound one": lambda d: adapter(
        d, _zipped(_tensor_pickle("I2\nI2\n", 4)) + bytes(0), name="adapter_model.bin"
    ),
}


def _zip_bomb(size: int) -> bytes:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("archive/data.pkl", "w", force_zip64=True) as member,
    ):
        block = b"\x80\x02" + b"N0" * (1 << 23)
        for _ in range(size // len(block) // 64):
            member.write(block)
    return file.getvalue()


def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = {**CASES, **SOUND}[name](Path(folder))
        resource.setrlimit(resource.RLIMIT_AS, (_used() + LIMIT_BYTES, -1))
        begin = time.process_time()
        try:
            found = f"read {len(read_adapter(path).modules)} modules"
        except UllageError as error:
            found = f"refused {error}"
        except MemoryError:
            found = "MemoryError"
        print(json.dumps({"seconds": time.process_time() - begin, "found": found}))


def _used() -> int:
    """The address space that making the case left behind."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1])

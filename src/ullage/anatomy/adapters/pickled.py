"""A pickled adapter (.bin, .pt) → its tensors' names, types and shapes, from the opcodes alone.

Holds a pickle machine that builds nothing but strings, numbers, tuples and dicts; whatever a
pickle would call is only noted. Nothing is imported and no tensor data is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.anatomy.adapters.adapter import AdapterTensor
from ullage.anatomy.adapters.keys import parse_key
from ullage.anatomy.files.pickles import PickleImports, pickle_bytes, strange_escapes
from ullage.errors import MalformedCheckpoint

if TYPE_CHECKING:
    from pickletools import OpcodeInfo

# A large model's adapter of 1,800 tensors needs some 80,000.
MAX_OPCODES = 120_000
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # torch before 1.6: five pickles, the object is the fourth
_LEGACY_OBJECT = 3
_MAX_SIZE = 2**63

# torch's storage classes and dtypes, in the words of safetensors, with bytes per element.
_DTYPES = {
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
    "UntypedStorage": ("U8", 1),
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
# Where trainers keep the state dict inside a larger one (DeepSpeed, Lightning, Megatron).
_NESTED = ("module", "state_dict", "model", "adapter", "adapter_state_dict")


@dataclass(frozen=True, slots=True)
class _Global:
    """A name that the pickle would import. It is never looked up."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    key: str
    num_elements: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    storage: _Storage


def read_pickled(file: Path) -> list[AdapterTensor]:
    """The tensors of a state dict that `torch.save` wrote, in order.

    Raises MalformedCheckpoint: the pickle would import more than tensors need, cannot be followed,
    holds no state dict, or describes more data than the file has.
    """
    raw, pickles, reason = pickle_bytes(file)
    if reason is not None:
        raise MalformedCheckpoint(f"a pickle that cannot be followed: {reason}", file=file)
    imports: set[str] = set()
    found, broken = _results(raw, pickles, imports)
    names = PickleImports(str(file), tuple(sorted(imports)))
    if names.beyond_tensors:
        does = "runs code" if names.dangerous else "a file of tensors has no need of"
        raise MalformedCheckpoint(
            f"a pickle that would import {', '.join(names.beyond_tensors[:4])}, which {does}",
            file=file,
            expected="adapter_model.safetensors",
        )
    if broken is not None:
        raise MalformedCheckpoint(f"a pickle that cannot be followed: {broken}", file=file)
    state = _state_dict(found)
    if state is None:
        raise MalformedCheckpoint(
            "a pickle without a dict of tensors", file=file, expected="a state dict"
        )
    _check_size(state, file)
    return [
        AdapterTensor(parse_key(name), t.dtype, t.shape, _num_bytes(t), str(file))
        for name, t in state.items()
    ]


def _num_bytes(tensor: _Tensor) -> int:
    total = tensor.item_bytes
    for size in tensor.shape:
        total *= size
    return total


def _check_size(state: dict[str, _Tensor], file: Path) -> None:
    """The storages together must fit into the file, and each tensor into its storage."""
    storages = {t.storage.key: t.storage.num_elements * t.item_bytes for t in state.values()}
    held = file.stat().st_size
    if sum(storages.values()) > held:
        raise MalformedCheckpoint(
            f"tensors of {sum(storages.values())} bytes in {held} bytes", file=file
        )
    for name, tensor in state.items():
        if _num_bytes(tensor) > storages[tensor.storage.key]:
            raise MalformedCheckpoint(
                f"a tensor of {_num_bytes(tensor)} bytes in a storage of "
                f"{storages[tensor.storage.key]}",
                file=file,
                field=name[:120],
            )


def _state_dict(found: list[object]) -> dict[str, _Tensor] | None:
    """The tensors of the pickled object, or of the state dict that it holds."""
    legacy = len(found) > _LEGACY_OBJECT and found[0] == _LEGACY_MAGIC
    value = found[_LEGACY_OBJECT if legacy else 0] if found else None
    for _ in range(3):
        if not isinstance(value, dict):
            return None
        tensors = {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, _Tensor)}
        if tensors:
            return tensors
        value = next((value[key] for key in _NESTED if isinstance(value.get(key), dict)), None)
    return None


@strange_escapes()
def _results(raw: bytes, pickles: int, imports: set[str]) -> tuple[list[object], str | None]:
    """What each of the pickles in `raw` builds, and why the first could not be followed to its end.

    `imports` receives the names that they would import. Behind the last one raw numbers may follow.
    """
    import io
    import pickletools

    stream = io.BytesIO(raw)
    results: list[object] = []
    left = MAX_OPCODES
    for number in range(pickles):
        machine = _Machine(imports)
        try:
            for opcode, argument, _ in pickletools.genops(stream):
                machine.step(opcode, argument)
                left -= 1
                if left <= 0:
                    return [], f"more than {MAX_OPCODES} opcodes"
        except (ValueError, IndexError, TypeError, OverflowError, RecursionError) as error:
            if number == 0:
                return [], str(error)[:200]
            break
        results.append(machine.stack[-1] if machine.stack else None)
    return results, None


class _Machine:
    """The pickle machine's stack and memo; calls and states of objects come to nothing."""

    __slots__ = ("imports", "marks", "memo", "stack")

    def __init__(self, imports: set[str]) -> None:
        self.imports = imports
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[object, object] = {}

    def step(self, opcode: OpcodeInfo, argument: object) -> None:
        """Follows one opcode. Raises ValueError for one that no state dict needs."""
        name, stack = opcode.name, self.stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _LITERALS:
            stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo.get(argument))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self._global(name, argument)
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in ("TUPLE", "LIST", "DICT", "SETITEMS", "APPENDS", "POP_MARK"):
            self._marked(name)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            width = int(name[-1])
            items = tuple(stack[-width:])
            del stack[-width:]
            stack.append(items)
        elif name in ("SETITEM", "APPEND", "BUILD", "POP", "DUP"):
            self._plain(name)
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, callee = stack.pop(), stack.pop()
            stack.append(_called(callee, arguments))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"the opcode {name}")

    def _global(self, name: str, argument: object) -> None:
        if name == "GLOBAL":
            found = str(argument).replace(" ", ".", 1)
        else:
            attribute, module = self.stack.pop(), self.stack.pop()
            if not isinstance(attribute, str) or not isinstance(module, str):
                raise ValueError("a name computed at load time")
            found = f"{module}.{attribute}"
        self.imports.add(found[:300])
        self.stack.append(_Global(found))

    def _marked(self, name: str) -> None:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        if name == "TUPLE":
            self.stack.append(tuple(items))
        elif name == "LIST":
            self.stack.append(items)
        elif name == "DICT":
            self.stack.append(_pairs(items))
        elif name == "SETITEMS":
            target = self.stack[-1]
            if isinstance(target, dict):
                target.update(_pairs(items))
        elif name == "APPENDS":
            target = self.stack[-1]
            if isinstance(target, list):
                target.extend(items)

    def _plain(self, name: str) -> None:
        stack = self.stack
        if name == "DUP":
            stack.append(stack[-1])
            return
        value = stack.pop()
        if name == "SETITEM":
            key, target = stack.pop(), stack[-1]
            if isinstance(target, dict):
                target.update(_pairs([key, value]))
        elif name == "APPEND":
            target = stack[-1]
            if isinstance(target, list):
                target.append(value)


_CONSTANTS: dict[str, Callable[[], object]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": list,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE"),
        *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "PERSID"),
    )
)


def _pairs(items: list[object]) -> dict[str, object]:
    """Keys and values by turns; keys that are no strings are left out, for they name no tensor."""
    return {
        key: value
        for key, value in zip(items[::2], items[1::2], strict=False)
        if isinstance(key, str)
    }


def _called(callee: object, arguments: object) -> object:
    """What a call gives: a dict, a tensor, a parameter's tensor; None for anything else."""
    name = callee.name if isinstance(callee, _Global) else ""
    if name == "collections.OrderedDict":
        return {}
    if not isinstance(arguments, tuple) or not arguments:
        return None
    if name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
        return arguments[0]
    if name == "torch._tensor._rebuild_from_type_v2" and len(arguments) == 4:
        inner = arguments[2]
        return _called(arguments[0], inner)
    if name.startswith("torch._utils._rebuild_tensor") and len(arguments) >= 3:
        storage, _, shape = arguments[:3]
        kind = arguments[6] if name.endswith("_v3") and len(arguments) > 6 else None
        return _rebuilt(storage, shape, kind)
    return None


def _rebuilt(storage: object, shape: object, dtype: object) -> _Tensor:
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple):
        raise ValueError("a tensor without a storage")
    sizes = tuple(size for size in shape if type(size) is int and 0 <= size < _MAX_SIZE)
    if len(sizes) != len(shape):
        raise ValueError("a tensor whose shape is not made of sizes")
    word = dtype.name.rpartition(".")[2] if isinstance(dtype, _Global) else storage.kind
    if word not in _DTYPES:
        raise ValueError(f"a tensor of the unknown type {word[:80]}")
    name, item_bytes = _DTYPES[word]
    return _Tensor(name, item_bytes, sizes, storage)


def _storage(persistent: object) -> _Storage:
    """torch's persistent id: ("storage", class, key, device, number of elements)."""
    sound = isinstance(persistent, tuple) and len(persistent) >= 5 and persistent[0] == "storage"
    if not sound or not isinstance(persistent, tuple):
        raise ValueError("a persistent id that is no storage")
    kind, key, number = persistent[1], persistent[2], persistent[4]
    sized = type(number) is int and 0 <= number < _MAX_SIZE
    if not isinstance(kind, _Global) or not isinstance(key, str) or not sized:
        raise ValueError("a storage without a class, a key or a size")
    return _Storage(kind.name.rpartition(".")[2], key, number)

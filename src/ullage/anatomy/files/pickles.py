"""What a pickled weight file (*.bin, *.pt) would import, told from its opcodes: nothing is loaded.

Holds the listing of imports. Pickles are programs; whether one may run is the audit's verdict.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ullage.anatomy.checkpoint import open_regular
from ullage.errors import MalformedCheckpoint

if TYPE_CHECKING:
    from pickletools import OpcodeInfo

MAX_PICKLE_BYTES = 32 * 2**20
MAX_DIRECTORY_BYTES = 32 * 2**20
MAX_OPCODES = 500_000
MAX_IMPORTS = 1000
MAX_FILES = 256
_LEGACY_PICKLES = 5  # magic number, protocol, system, objects, storage keys (torch before 1.6)

# What a state dict of tensors needs, by module (torch 2.13, weights_only unpickler).
_TENSOR_IMPORTS = {
    "collections": {"OrderedDict", "Counter"},
    "_codecs": {"encode"},
    "torch": {
        *("Size", "Tensor", "device", "dtype"),
        *(
            f"{kind}Storage"
            for kind in (
                *("Double", "Float", "Half", "Long", "Int", "Short", "Char", "Byte", "Bool"),
                *("BFloat16", "ComplexDouble", "ComplexFloat", "QUInt8", "QInt8", "QInt32"),
                *("QUInt4x2", "QUInt2x4", "Untyped"),
            )
        ),
        *("bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
        *("uint8", "bool", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    },
    "torch._utils": {
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
        "_rebuild_qtensor",
        "_rebuild_sparse_tensor",
        "_rebuild_meta_tensor_no_storage",
    },
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch.nn.parameter": {"Parameter"},
    "torch.storage": {"UntypedStorage"},
}

# Modules of which any attribute runs code, touches files or the network, or undoes these checks.
_DANGEROUS_MODULES = frozenset(
    (
        *("os", "posix", "nt", "posixpath", "subprocess", "_posixsubprocess", "pty", "commands"),
        *("sys", "ctypes", "_ctypes", "cffi", "mmap", "signal", "resource", "atexit"),
        *(
            "importlib",
            "imp",
            "pkgutil",
            "zipimport",
            "runpy",
            "code",
            "codeop",
            "types",
            "inspect",
        ),
        *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"),
        *(
            "socket",
            "ssl",
            "http",
            "urllib",
            "urllib2",
            "ftplib",
            "smtplib",
            "telnetlib",
            "asyncio",
        ),
        *("requests", "httpx", "aiohttp", "webbrowser", "xmlrpc", "socketserver", "paramiko"),
        *(
            "shutil",
            "tempfile",
            "pathlib",
            "io",
            "_io",
            "glob",
            "fileinput",
            "linecache",
            "zipfile",
        ),
        *("pdb", "bdb", "timeit", "trace", "profile", "cProfile", "doctest", "unittest", "idlelib"),
        *("pip", "setuptools", "distutils", "ensurepip", "venv", "site", "threading", "_thread"),
        *("multiprocessing", "concurrent", "gc", "weakref", "torch.hub"),
        *("torch.jit", "torch._dynamo", "torch._inductor", "torch.utils", "torch.package"),
        *("torch.distributed", "torch.fx", "torch.ops", "torch.multiprocessing", "numpy.testing"),
        *(
            "numpy.f2py",
            "numpy.distutils",
            "transformers.dynamic_module_utils",
            "sqlite3",
            "logging",
        ),
    )
)
_DANGEROUS_NAMES = frozenset(
    (
        *(
            f"{module}.{name}"
            for module in ("builtins", "__builtin__", "__builtins__")
            for name in (
                *("eval", "exec", "execfile", "compile", "open", "file", "__import__", "getattr"),
                *("setattr", "delattr", "globals", "locals", "vars", "dir", "apply", "reload"),
                *(
                    "breakpoint",
                    "input",
                    "raw_input",
                    "map",
                    "filter",
                    "type",
                    "super",
                    "memoryview",
                ),
            )
        ),
        *("operator.attrgetter", "operator.methodcaller", "operator.itemgetter", "operator.call"),
        *("_operator.attrgetter", "_operator.methodcaller", "_operator.itemgetter"),
        *("functools.partial", "functools.reduce", "_functools.partial", "itertools.starmap"),
        *(
            "torch.load",
            "torch.save",
            "torch.serialization.load",
            "numpy.load",
            "numpy.save",
            "numpy.fromfile",
            "numpy.memmap",
        ),
        *("copyreg.add_extension", "copyreg.pickle", "torch._utils._import_dotted_name"),
        *("torch.classes", "torch.compile", "torch._C", "copy.deepcopy"),
    )
)


@dataclass(frozen=True, slots=True)
class PickleImports:
    """The names (`module.attribute`) that loading `file` would import, sorted.

    `reason` is None when the whole pickle was followed; else why the list may be incomplete.
    """

    file: str
    imports: tuple[str, ...]
    reason: str | None = None

    @property
    def dangerous(self) -> tuple[str, ...]:
        """Imports that are known to run code or to reach outside (`is_dangerous`)."""
        return tuple(name for name in self.imports if is_dangerous(name))

    @property
    def beyond_tensors(self) -> tuple[str, ...]:
        """Imports that a state dict of tensors has no need of."""
        return tuple(name for name in self.imports if not _is_for_tensors(name))


def all_imports(files: Iterable[Path]) -> tuple[PickleImports, ...]:
    """What each of `files` would import; one that is no readable pickle says so as its reason.

    Of very many files the first 256 are followed, and the rest say that they were not.
    """
    found = []
    for number, file in enumerate(files):
        if number >= MAX_FILES:
            found.append(PickleImports(str(file), (), f"only {MAX_FILES} files are followed"))
            continue
        try:
            found.append(pickle_imports(file))
        except MalformedCheckpoint as error:
            found.append(PickleImports(str(file), (), str(error.found)))
    return tuple(found)


def is_dangerous(name: str) -> bool:
    """Whether `module.attribute` is known to run code, open files, or reach the network.

    A whole module is named where nothing in it belongs in weights. What is not named here is not
    therefore harmless: see `beyond_tensors`.
    """
    if name in _DANGEROUS_NAMES or name.startswith("(a name computed"):
        return True
    while (dot := name.rfind(".")) > 0:
        name = name[:dot]
        if name in _DANGEROUS_MODULES:
            return True
    return False


def _is_for_tensors(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return attribute in _TENSOR_IMPORTS.get(module, ())


def pickle_imports(file: Path) -> PickleImports:
    """Reads the opcodes of a zip archive's `data.pkl` or of a bare pickle, and loads nothing.

    Raises MalformedCheckpoint when the file cannot be read or is no pickle at all.
    """
    raw, pickles, reason = pickle_bytes(file)
    imports, broken = _walk(raw, pickles)
    return PickleImports(str(file), tuple(sorted(imports)), broken or reason)


def pickle_bytes(file: Path) -> tuple[bytes, int, str | None]:
    """The pickle of a zip archive or a bare file, how many may follow one another in it, and why
    it is not complete (None when it is).

    Raises MalformedCheckpoint when the file cannot be read or is no pickle at all.
    """
    with open_regular(file) as (stream, file_bytes):
        magic = stream.read(4)
        stream.seek(0)
        if magic == b"PK\3\4":
            raw, reason = _from_zip(stream, file, file_bytes)
            return raw, 1, reason
        raw = stream.read(MAX_PICKLE_BYTES)
        if not raw.startswith((b"\x80", b"(", b"c", b"}", b"]")):
            raise MalformedCheckpoint(f"begins with {magic!r}", file=file, expected="a pickle")
        return raw, _LEGACY_PICKLES, None


def _from_zip(stream: BinaryIO, file: Path, file_bytes: int) -> tuple[bytes, str | None]:
    """The first 32 MiB of the archive's pickle, and what could not be read."""
    import zipfile

    stream.seek(max(0, file_bytes - 65_557))
    tail = stream.read(65_557)
    end = tail.rfind(b"PK\5\6")
    directory_bytes = int.from_bytes(tail[end + 12 : end + 16], "little")
    # 2^32 − 1 refers to a zip64 record, whose size zipfile checks against the file.
    if end < 0 or MAX_DIRECTORY_BYTES < directory_bytes < 2**32 - 1 or file_bytes > 2**46:
        raise MalformedCheckpoint("its zip directory is not usable", file=file)
    try:
        with zipfile.ZipFile(stream) as archive:
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            if len(names) != 1:
                raise MalformedCheckpoint(
                    f"{len(names)} files called data.pkl", file=file, expected="one"
                )
            with archive.open(names[0]) as member:
                raw = member.read(MAX_PICKLE_BYTES + 1)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise MalformedCheckpoint(f"not a usable zip archive ({error})", file=file) from None
    if len(raw) > MAX_PICKLE_BYTES:
        return raw, f"only the first {MAX_PICKLE_BYTES} bytes were followed"
    return raw, None


@contextmanager
def strange_escapes() -> Iterator[None]:
    """Let Python say nothing of `\\z` in a pickle's strings: that is its author's affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@strange_escapes()
def _walk(raw: bytes, max_pickles: int) -> tuple[set[str], str | None]:
    """The imports of up to `max_pickles` pickles in a row, and why the walk ended early."""
    import pickletools

    stream = io.BytesIO(raw)
    imports: set[str] = set()
    left = MAX_OPCODES
    for number in range(max_pickles):
        machine = _Machine()
        try:
            for opcode, argument, _ in _bounded(pickletools.genops(stream), left):
                left -= 1
                found = machine.step(opcode, argument)
                if found is not None:
                    imports.add(found)
                if len(imports) > MAX_IMPORTS:
                    return imports, f"more than {MAX_IMPORTS} imports"
            if left <= 0:
                return imports, f"more than {MAX_OPCODES} opcodes"
        except (ValueError, IndexError, UnicodeError, OverflowError, MemoryError) as error:
            # Behind the pickles of the older format lie raw numbers.
            return imports, None if number >= 1 and max_pickles > 1 else f"broken: {error}"
    return imports, None


def _bounded(
    opcodes: Iterator[tuple[OpcodeInfo, object, int | None]], limit: int
) -> Iterator[tuple[OpcodeInfo, object, int | None]]:
    for number, opcode in enumerate(opcodes):
        if number >= limit:
            return
        yield opcode


class _Machine:
    """The pickle machine's stack and memo, with strings kept and everything else forgotten."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.mark = object()

    def step(self, opcode: OpcodeInfo, argument: object) -> str | None:
        """Follows one opcode; the name that it imports, or None."""
        name = opcode.name
        found = None
        if name in ("GLOBAL", "INST"):
            found = str(argument).replace(" ", ".", 1)
        elif name == "STACK_GLOBAL":
            parts = self.stack[-2:]
            named = len(parts) == 2 and all(isinstance(part, str) for part in parts)
            found = f"{parts[0]}.{parts[1]}" if named else "(a name computed at load time)"
        elif name.startswith("EXT"):
            found = f"copyreg extension {argument}"
        self.follow(opcode, argument)
        return None if found is None else found[:300]

    def follow(self, opcode: OpcodeInfo, argument: object) -> None:
        name, stack = opcode.name, self.stack
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            key = len(self.memo) if name == "MEMOIZE" else argument
            if isinstance(key, int) and stack:
                self.memo[key] = stack[-1]
            return
        if name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo.get(argument) if isinstance(argument, int) else None)
            return
        if name == "MARK":
            stack.append(self.mark)
            return
        if name == "DUP":
            stack.append(stack[-1] if stack else None)
            return
        before = opcode.stack_before
        if any(item.name == "mark" for item in before):
            while stack and stack.pop() is not self.mark:
                pass
            # What stands below the mark is popped as well (APPENDS, SETITEMS, …).
            below = next(i for i, item in enumerate(before) if item.name == "mark")
            del stack[max(0, len(stack) - below) :]
        else:
            del stack[max(0, len(stack) - len(before)) :]
        text = argument if isinstance(argument, str) and "UNICODE" in name else None
        text = argument if isinstance(argument, str) and "STRING" in name else text
        stack.extend(text for _ in opcode.stack_after)

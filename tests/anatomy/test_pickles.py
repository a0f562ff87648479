"""Pickled weights are listed by their opcodes; nothing of them is ever run."""

from __future__ import annotations

import collections
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ullage.anatomy.files.pickles import MAX_FILES, all_imports, is_dangerous, pickle_imports
from ullage.errors import MalformedCheckpoint


class Harmful:
    """Pickles to a call of os.system that would leave a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.trace}",)


def zipped(file: Path, raw: bytes, name: str = "archive/data.pkl") -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, raw)
    return file


def test_what_torch_saves_needs_tensors_only(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = collections.OrderedDict(
        weight=torch.zeros(3, dtype=torch.bfloat16),
        half=torch.nn.Parameter(torch.zeros(2, dtype=torch.float16)),
        counts=torch.zeros(2, dtype=torch.int64),
        quantised=torch.zeros(4, dtype=torch.float8_e4m3fn),
    )
    for name, is_zip in (("new.bin", True), ("old.bin", False)):
        saved = {**state} if is_zip else {k: v for k, v in state.items() if k != "quantised"}
        torch.save(saved, tmp_path / name, _use_new_zipfile_serialization=is_zip)
        listed = pickle_imports(tmp_path / name)
        assert "torch._utils._rebuild_tensor_v2" in listed.imports
        assert "torch.BFloat16Storage" in listed.imports
        assert listed.beyond_tensors == ()
        assert listed.reason is None


def test_the_imports_that_count_as_harmless_are_torch_s_own() -> None:
    unpickler = pytest.importorskip("torch._weights_only_unpickler")
    from ullage.anatomy.files.pickles import _TENSOR_IMPORTS

    allowed = set(unpickler._get_allowed_globals())
    ours = {f"{module}.{name}" for module, names in _TENSOR_IMPORTS.items() for name in names}
    # Storages under torch. are looked up by name there, by a table of its own.
    assert {name for name in ours - allowed if not name.endswith("Storage")} <= {"torch.dtype"}


def test_no_import_that_torch_allows_counts_as_dangerous() -> None:
    unpickler = pytest.importorskip("torch._weights_only_unpickler")
    assert [name for name in unpickler._get_allowed_globals() if is_dangerous(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "posix.system", "nt.system", "subprocess.Popen", "builtins.eval"),
        *("builtins.exec", "__builtin__.eval", "builtins.getattr", "builtins.__import__"),
        *("runpy.run_path", "importlib.import_module", "pickle.loads", "_pickle.loads"),
        *("socket.socket", "urllib.request.urlopen", "torch.hub.load", "torch.load"),
        *("operator.attrgetter", "functools.partial", "ctypes.CDLL", "webbrowser.open"),
        *("numpy.testing._private.utils.runstring", "torch.utils.cpp_extension.load", "sys.exit"),
        "(a name computed at load time)",
    ],
)
def test_what_runs_code_or_reaches_out_is_dangerous(name: str) -> None:
    assert is_dangerous(name)


@pytest.mark.parametrize(
    "name",
    [
        *("collections.OrderedDict", "torch.FloatStorage", "torch._utils._rebuild_tensor_v2"),
        *("builtins.set", "builtins.dict", "numpy.core.multiarray._reconstruct", "numpy.dtype"),
        *("argparse.Namespace", "osmosis.Model", "system.os", "transformers.TrainingArguments"),
    ],
)
def test_what_holds_data_or_is_unknown_is_not_called_dangerous(name: str) -> None:
    assert not is_dangerous(name)


def test_many_files_are_listed_and_each_tells_why_it_could_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "harm.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "trace"), 2))
    empty, harm, gone = all_imports(tmp_path / f"{n}.bin" for n in ("empty", "harm", "gone"))
    assert empty.reason is not None and gone.reason is not None and harm.reason is None
    assert harm.dangerous and not empty.dangerous
    many = all_imports([tmp_path / "empty.bin"] * (MAX_FILES + 1))
    assert "are followed" in (many[-1].reason or "")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("as_zip", [True, False])
def test_harm_is_listed_and_not_run(tmp_path: Path, protocol: int, as_zip: bool) -> None:
    trace = tmp_path / "trace"
    raw = pickle.dumps({"w": Harmful(trace)}, protocol)
    file = tmp_path / "w.bin"
    if as_zip:
        zipped(file, raw)
    else:
        file.write_bytes(raw)
    listed = pickle_imports(file)
    assert f"{os.system.__module__}.system" in listed.imports
    assert listed.beyond_tensors
    assert not trace.exists()


def test_a_name_out_of_the_memo_is_followed(tmp_path: Path) -> None:
    raw = (
        b"\x80\x04\x8c\x02os\x940"  # a string, memoised and dropped again
        b"\x8c\x06system\x940"
        b"h\x00h\x01\x93."
    )
    (tmp_path / "w.bin").write_bytes(raw)
    assert pickle_imports(tmp_path / "w.bin").imports == ("os.system",)


def test_a_computed_name_is_said_to_be_computed(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"\x80\x04K\x01K\x02\x93.")
    assert pickle_imports(tmp_path / "w.bin").beyond_tensors == ("(a name computed at load time)",)


@pytest.mark.parametrize(
    ("raw", "fragment"),
    [(b"", "a pickle"), (b"GGUF", "a pickle"), (b"PK\3\4", "zip directory"), (b"\x89PNG", "PNG")],
)
def test_what_is_no_pickle_is_refused(tmp_path: Path, raw: bytes, fragment: str) -> None:
    (tmp_path / "w.bin").write_bytes(raw)
    with pytest.raises(MalformedCheckpoint, match=fragment):
        pickle_imports(tmp_path / "w.bin")


def test_a_zip_without_a_pickle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedCheckpoint, match=r"0 files called data\.pkl"):
        pickle_imports(zipped(tmp_path / "w.bin", b"", "other"))


def test_a_length_that_lies_is_a_broken_pickle(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.")
    assert "broken" in (pickle_imports(tmp_path / "w.bin").reason or "")


def test_endless_opcodes_end(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"\x80\x02" + b"N0" * 3_000_000)
    assert "opcodes" in (pickle_imports(tmp_path / "w.bin").reason or "")


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(raw=b"c\\z\nx\n.", start=b"\x80\x02")  # an escape that Python does not know
@given(raw=st.binary(max_size=60), start=st.sampled_from([b"\x80\x04", b"\x80\x02", b"(", b""]))
def test_any_bytes_give_a_list_or_one_sentence(tmp_path: Path, raw: bytes, start: bytes) -> None:
    (tmp_path / "w.bin").write_bytes(start + raw)
    try:
        listed = pickle_imports(tmp_path / "w.bin")
    except MalformedCheckpoint as error:
        assert str(error)
        return
    assert all(isinstance(name, str) for name in listed.imports)

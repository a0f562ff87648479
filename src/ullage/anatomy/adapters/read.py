"""A directory or file → `Adapter`: which files belong to it, what their headers hold.

Holds the choice of files and the opening of them; nothing is executed, and of pickles only the
opcodes are followed (`pickled.py`). The configuration is `config.py`, the modules `modules.py`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ullage.anatomy.adapters.adapter import Adapter, AdapterConfig, AdapterTensor
from ullage.anatomy.adapters.config import CONFIG_NAME, read_adapter_config
from ullage.anatomy.adapters.keys import parse_key
from ullage.anatomy.adapters.modules import as_trained, group
from ullage.anatomy.checkpoint import TensorEntry
from ullage.anatomy.files.index import read_checkpoint
from ullage.anatomy.files.weight_map import read_weight_map
from ullage.errors import BadUsage, MalformedCheckpoint

MAX_TENSORS = 200_000
_MAX_LISTED = 100_000
_MAX_SHARDS = 1_000
_MAX_NAME_CHARS = 4_000
_EXPECTED = "an adapter: adapter_config.json with adapter_model.safetensors"

# By how willingly they are taken: the first that is there wins. PEFT reads the first and the
# fourth (utils/save_and_load.py of 0.21.2), MLX the third.
_INDEX = "adapter_model.safetensors.index.json"
_CHOICES = ("adapter_model.safetensors", _INDEX, "adapters.safetensors")
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_SHARD = re.compile(r"(adapter_model|adapters?)-([0-9]{5})-of-([0-9]{5})\.safetensors")
_TORCHTUNE = re.compile(r"adapter_[0-9]+\.pt")


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The weight files of an adapter, before anything was read."""

    files: tuple[Path, ...]
    unused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    kind: str = "safetensors"


def read_adapter(path: Path) -> Adapter:
    """The adapter at `path`: its directory, its adapter_config.json or its weight file.

    Raises:
        BadUsage: nothing there, or something else than an adapter.
        MalformedConfig: adapter_config.json is not valid.
        MalformedCheckpoint: a weight file lies, or leaves the directory, or would run code.
    """
    folder, names, given = _listed(path)
    chosen = _choose(folder, names, given)
    for file in (folder / CONFIG_NAME, *chosen.files):
        _stay_inside(file, folder)
    config = read_adapter_config(folder / CONFIG_NAME)
    if chosen.kind == "pickle":
        from ullage.anatomy.adapters.pickled import read_pickled

        tensors = [t for file in chosen.files for t in read_pickled(file)]
        missing, files = chosen.missing, tuple(str(file) for file in chosen.files)
    else:
        tensors, missing, files = _headers(folder, chosen)
    if not tensors:
        raise MalformedCheckpoint("holds no tensor", file=path, expected="an adapter's tensors")
    config = replace(config, writer=_writer(config, names, tensors))
    tensors = as_trained(tensors, config)
    return Adapter(
        path=str(path),
        config=config,
        tensors=tuple(tensors),
        modules=group(tensors, config),
        files=files,
        from_pickle=chosen.kind == "pickle",
        missing_files=missing,
        unused_files=chosen.unused,
    )


def _listed(path: Path) -> tuple[Path, list[str], str | None]:
    """The directory, the names of its files, and the weight file that was given, if any."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadUsage(f"cannot be opened: {reason}", file=path, expected=_EXPECTED) from None
    if stat.S_ISDIR(mode):
        return path, _names(path), None
    if not stat.S_ISREG(mode):
        raise BadUsage("not a regular file", file=path, expected=_EXPECTED)
    given = None if path.name == CONFIG_NAME else path.name
    return path.parent, _names(path.parent), given


def _names(folder: Path) -> list[str]:
    names: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if len(names) >= _MAX_LISTED:
                    raise BadUsage(f"more than {_MAX_LISTED} files", file=folder)
                names.append(entry.name)
    except OSError as error:
        raise BadUsage(f"cannot be listed: {error.strerror}", file=folder) from None
    return sorted(names)


def _choose(folder: Path, names: list[str], given: str | None) -> _Chosen:
    """Which of the files hold the adapter."""
    weights = [n for n in names if n.endswith((".safetensors", *_PICKLES)) or n in _PICKLES]
    if CONFIG_NAME not in names:
        raise _no_config(folder, names, weights)
    if given is not None:
        kind = "pickle" if not given.endswith((".safetensors", ".index.json")) else "safetensors"
        return _Chosen((folder / given,), tuple(n for n in weights if n != given), kind=kind)
    for name in _CHOICES:
        if name in names:
            shards = [n for n in weights if _SHARD.fullmatch(n)] if name == _INDEX else []
            unused = tuple(n for n in weights if n != name and n not in shards)
            return _Chosen((folder / name,), unused)
    shards = [n for n in weights if _SHARD.fullmatch(n)]
    if shards:
        return _sharded(folder, shards, weights)
    pickles = [n for n in _PICKLES if n in names] or [n for n in names if _TORCHTUNE.fullmatch(n)]
    if pickles:
        unused = tuple(n for n in weights if n != pickles[-1])
        name = pickles[0] if pickles[0] in _PICKLES else pickles[-1]  # torchtune counts epochs
        return _Chosen((folder / name,), unused, kind="pickle")
    raise _no_weights(folder, names)


def _sharded(folder: Path, shards: list[str], weights: list[str]) -> _Chosen:
    """Shards that no index file ties together: all parts of one set, by their names."""
    sets = {(m[1], m[3]) for m in map(_SHARD.fullmatch, shards) if m is not None}
    if len(sets) > 1:
        raise MalformedCheckpoint(
            f"holds shards of {len(sets)} adapters ({', '.join(shards[:4])})",
            file=folder,
            expected="one of them",
        )
    stem, total = next(iter(sets))
    if int(total) > _MAX_SHARDS:
        raise MalformedCheckpoint(f"claims {total} shards", file=folder / shards[0])
    wanted = [f"{stem}-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
    present = [name for name in wanted if name in shards]
    return _Chosen(
        tuple(folder / name for name in present),
        tuple(n for n in weights if n not in wanted),
        tuple(str(folder / name) for name in wanted if name not in shards),
    )


def _no_config(folder: Path, names: list[str], weights: list[str]) -> BadUsage:
    """The sentence for a directory without adapter_config.json, by what is there instead."""
    if any(name.endswith(".distcp") for name in names) or "metadata.json" in names:
        found = "a distributed checkpoint of training, without adapter_config.json"
        expected = "the adapter as its training program exports it for Hugging Face"
    elif any(name.endswith(".nemo") for name in names):
        found, expected = "a .nemo archive", "the adapter exported in PEFT's layout"
    elif "config.json" in names and not any(n.startswith("adapter") for n in names):
        found, expected = "holds a whole model (config.json), not an adapter", _EXPECTED
    else:
        inside = [n for n in names if _holds_config(folder / n)][:4]
        if inside:
            found = f"no adapter_config.json, but its folders have one: {', '.join(inside)}"
            expected = "one of these folders"
        else:
            beside = f" beside {weights[0]}" if weights else ""
            found, expected = f"no adapter_config.json{beside}", _EXPECTED
    return BadUsage(found, file=folder, expected=expected)


def _holds_config(folder: Path) -> bool:
    try:
        return (folder / CONFIG_NAME).is_file()
    except OSError:
        return False


def _no_weights(folder: Path, names: list[str]) -> BadUsage:
    others = [n for n in names if n.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf"))]
    found = "adapter_config.json without weights"
    if others:
        found += f" of a known name (there is {', '.join(others[:4])})"
    expected = "adapter_model.safetensors" + (", or the path of the file" if others else "")
    return BadUsage(found, file=folder, expected=expected)


def _stay_inside(file: Path, folder: Path) -> None:
    """Refuses a link that leads out of the directory, unless into a cache of downloads."""
    try:
        real, home = file.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError):
        raise MalformedCheckpoint("a link that leads nowhere", file=file) from None
    # The hub's cache, and older downloads that link into it: models--OWNER--NAME/blobs/HASH.
    cached = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if not real.is_relative_to(home) and not cached:
        raise MalformedCheckpoint(
            f"a link out of the directory, to {real}", file=file, expected="a file inside it"
        )


def _headers(
    folder: Path, chosen: _Chosen
) -> tuple[list[AdapterTensor], tuple[str, ...], tuple[str, ...]]:
    """The tensors of safetensors files, what is missing of them, and the files read."""
    entries: list[TensorEntry] = []
    missing, files = list(chosen.missing), list[str]()
    for file in chosen.files:
        if file.name.endswith(".index.json"):
            for name in set(read_weight_map(file)[0].values()):
                _stay_inside(folder / name, folder)
        index = read_checkpoint(file)
        if index is None:
            raise MalformedCheckpoint("not a weight file", file=file)
        entries.extend(index.tensors)
        _check_number(len(entries), file)
        missing.extend(index.missing_files)
        files.extend(index.files)
    if not files:
        raise MalformedCheckpoint(
            f"{len(missing)} shards are named, and none is there", file=chosen.files[0]
        )
    return [_tensor(entry) for entry in entries], tuple(missing), tuple(files)


def _tensor(entry: TensorEntry) -> AdapterTensor:
    if len(entry.name) > _MAX_NAME_CHARS:
        raise MalformedCheckpoint(
            f"a tensor's name of {len(entry.name)} characters",
            file=entry.file,
            expected=f"at most {_MAX_NAME_CHARS}",
        )
    return AdapterTensor(
        parse_key(entry.name), entry.dtype, entry.shape, entry.num_bytes, entry.file, entry.start
    )


def _check_number(number: int, path: Path) -> None:
    if number > MAX_TENSORS:
        raise MalformedCheckpoint(
            f"{number} tensors up to here", file=path, expected=f"at most {MAX_TENSORS}"
        )


def _writer(config: AdapterConfig, names: list[str], tensors: Iterable[AdapterTensor]) -> str:
    """The program whose layout this is, as far as files and keys betray it."""
    words = {tensor.key.parameter for tensor in tensors}
    if "linear_in" in words:
        return "megatron"
    raw = config.raw or {}
    if "nvfp4_merge_aware" in raw:
        return "axolotl"
    if config.writer != "peft":
        return config.writer
    if "additional_config.json" in names:
        return "ms-swift"
    if words & {"lora_a", "lora_b"} or "adapter_model.pt" in names:
        return "torchtune"
    if "llamaboard_config.yaml" in names or "trainer_log.jsonl" in names:
        return "llama-factory"
    return "peft"

"""A directory or file of weights → `CheckpointIndex`: which files belong together, what they hold.

Holds the choice of files (single, sharded by an index file, split GGUF) and the merging of their
headers. Files are only ever opened by plain names inside the directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.anatomy.checkpoint import MAX_TENSORS, CheckpointIndex, TensorEntry, open_regular
from ullage.anatomy.files.safetensors import read_safetensors
from ullage.anatomy.files.weight_map import read_weight_map
from ullage.errors import MalformedCheckpoint

if TYPE_CHECKING:  # the reader of GGUF headers is imported where there is one to read
    from ullage.anatomy.gguf.header import GgufHeader

MAX_FILES = 100_000

_INDEX_SUFFIX = ".safetensors.index.json"
_SPLIT_GGUF = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
# Weights that are not the model itself: adapters, and projectors of multimodal GGUF models.
_NOT_THE_MODEL = re.compile(r"adapter_(model|.*)\.safetensors|mmproj.*\.gguf|.*-mmproj.*\.gguf")
# Mistral's own layout repeats the weights that other files of the directory hold.
_CONSOLIDATED = re.compile(r"consolidated.*\.safetensors(\.index\.json)?")


def read_checkpoint(path: Path) -> CheckpointIndex | None:
    """The tensors of a directory, a `.safetensors`, a `.gguf` or a `*.safetensors.index.json`.

    None when a directory holds no safetensors or GGUF weights. An index file whose shards are all
    absent gives an index without headers (`has_headers` is False), never zero bytes as a fact.
    Raises MalformedCheckpoint: a header or index file lies, names leave the directory, or several
    GGUF models lie side by side.
    """
    if _is_there(path) and path.is_dir():
        return _read_directory(path)
    if path.name.endswith(_INDEX_SUFFIX):
        return _read_sharded(path, unused=())
    if _begins_with_gguf(path):
        return gguf_index(read_gguf_parts(path))
    return _merge([path])


def read_gguf_parts(file: Path) -> tuple[tuple[GgufHeader, ...], tuple[str, ...]]:
    """The headers of a GGUF model, all parts of a split one, and the paths of parts not there."""
    from ullage.anatomy.gguf.header import (
        read_gguf,  # safetensors and plain configurations need none
    )

    found = _SPLIT_GGUF.fullmatch(file.name)
    if found is None:
        header = read_gguf(file)
        _check_split(header, 0, 1)
        return (header,), ()
    stem, _, count_text = found.groups()
    count = int(count_text)
    if not 1 <= int(found.group(2)) <= count:
        raise MalformedCheckpoint(f"part {found.group(2)} of {count_text}", file=file)
    headers, missing = [], []
    for number in range(1, count + 1):
        part = file.with_name(f"{stem}-{number:05d}-of-{count_text}.gguf")
        if _is_there(part):
            header = read_gguf(part)
            _check_split(header, number - 1, count)
            headers.append(header)
        else:
            missing.append(str(part))
    _check_split_total(headers, missing)
    return tuple(headers), tuple(missing)


def gguf_index(
    parts: tuple[tuple[GgufHeader, ...], tuple[str, ...]], unused: Iterable[str] = ()
) -> CheckpointIndex:
    """One index of the parts that `read_gguf_parts` gave. Metadata values are shown as text."""
    headers, missing = parts
    tensors, duplicates = _without_duplicates(t for header in headers for t in header.tensors)
    metadata = {
        key: str(value) for header in reversed(headers) for key, value in header.metadata.items()
    }
    return CheckpointIndex(
        format="gguf",
        tensors=tensors,
        files=tuple(header.file for header in headers),
        metadata=tuple(metadata.items()),
        missing_files=missing,
        duplicate_tensors=duplicates,
        unused_files=tuple(unused),
    )


def parts_of_split(name: str, names: Iterable[str]) -> list[str]:
    """Of `names`, the parts of the split GGUF model that `name` is one of; else `name` alone."""
    found = _SPLIT_GGUF.fullmatch(name)
    if found is None:
        return [name]
    parts = (_SPLIT_GGUF.fullmatch(other) for other in sorted(names))
    return [p[0] for p in parts if p is not None and (p[1], p[3]) == (found[1], found[3])]


def is_consolidated(name: str) -> bool:
    """Whether a file is of Mistral's own layout, which repeats other files' weights."""
    return _CONSOLIDATED.fullmatch(name) is not None


def is_adapter_or_projector(name: str) -> bool:
    """Whether a weight file is not the model itself."""
    return _NOT_THE_MODEL.fullmatch(name) is not None


def _check_split(header: GgufHeader, number: int, count: int) -> None:
    said = (header.metadata.get("split.no", number), header.metadata.get("split.count", count))
    if header.metadata.get("split.count", 0) == 0:  # an unsplit file may say 0 of 0
        return
    if said != (number, count):
        raise MalformedCheckpoint(
            f"calls itself part {said[0]} of {said[1]}",
            file=header.file,
            field="split.no",
            expected=f"part {number} of {count}, as its name says",
        )


def _check_split_total(headers: list[GgufHeader], missing: list[str]) -> None:
    if missing or not headers:
        return
    said = headers[0].metadata.get("split.tensors.count")
    total = sum(len(header.tensors) for header in headers)
    if said is not None and said != total:
        raise MalformedCheckpoint(
            f"{total} tensors in all parts",
            file=headers[0].file,
            field="split.tensors.count",
            expected=f"{said}",
        )


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise MalformedCheckpoint(f"cannot be opened ({error.strerror})", file=path) from error
    except ValueError as error:  # a NUL in the path
        raise MalformedCheckpoint(f"cannot be opened ({error})", file=str(path)) from error


def _begins_with_gguf(path: Path) -> bool:
    if path.suffix == ".gguf":
        return True
    with open_regular(path) as (stream, _):
        return stream.read(4) == b"GGUF"


def _read_directory(folder: Path) -> CheckpointIndex | None:
    """safetensors win over GGUF, an index file over a single one, all over Mistral's layout.

    That is vLLM 0.32's order (default_loader.py: *.safetensors, consolidated*.safetensors only as
    a fallback, then the index file filters duplicates).
    """
    names = _weight_names(folder)
    chosen = [n for n in names if not _CONSOLIDATED.fullmatch(n)] or names
    indexes = [n for n in chosen if n.endswith(_INDEX_SUFFIX)]
    files = [n for n in chosen if n.endswith(".safetensors")]
    if indexes:
        main = "model" + _INDEX_SUFFIX
        if main not in indexes and len(indexes) > 1:
            raise MalformedCheckpoint(
                f"holds {len(indexes)} index files ({', '.join(indexes[:4])})",
                file=folder,
                expected="one of them",
            )
        return _read_sharded(
            folder / (main if main in indexes else indexes[0]),
            unused=[n for n in names if not n.endswith(_INDEX_SUFFIX)],
        )
    if "model.safetensors" in files:
        files = ["model.safetensors"]
    if files:
        unused = [n for n in names if n not in files]
        return _merge([folder / name for name in files], unused=unused)
    model = choose_gguf(folder, chosen)
    return None if model is None else gguf_index(read_gguf_parts(model))


def choose_gguf(folder: Path, names: Iterable[str]) -> Path | None:
    """The one GGUF model (of a split one: a part) among the names of a directory, None without.

    Raises MalformedCheckpoint when there are several models: nobody may guess which is meant.
    """
    models: dict[str, str] = {}
    for name in sorted(names):
        if not name.endswith(".gguf") or _NOT_THE_MODEL.fullmatch(name):
            continue
        split = _SPLIT_GGUF.fullmatch(name)
        models.setdefault(f"{split[1]}-of-{split[3]}" if split else name, name)
    if not models:
        return None
    if len(models) > 1:
        raise MalformedCheckpoint(
            f"holds {len(models)} GGUF models ({', '.join(sorted(models)[:4])})",
            file=folder,
            expected="the path of one of them",
        )
    return folder / next(iter(models.values()))


def _weight_names(folder: Path) -> list[str]:
    """Names of files that may hold the model's weights, or list them, sorted."""
    names = []
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number >= MAX_FILES:
                    raise MalformedCheckpoint(f"more than {MAX_FILES} files", file=folder)
                name = entry.name
                wanted = name.endswith((".safetensors", ".gguf", _INDEX_SUFFIX))
                if wanted and not _NOT_THE_MODEL.fullmatch(name) and entry.is_file():
                    names.append(name)
    except OSError as error:
        raise MalformedCheckpoint(f"cannot be listed ({error.strerror})", file=folder) from error
    return sorted(names)


def _merge(files: list[Path], unused: Iterable[str] = ()) -> CheckpointIndex:
    """One index over safetensors files that no index file ties together."""
    entries, metadata = _read_all(files)
    kept, duplicates = _without_duplicates(entries)
    return CheckpointIndex(
        format="safetensors",
        tensors=kept,
        files=tuple(str(file) for file in files),
        metadata=metadata,
        duplicate_tensors=duplicates,
        unused_files=tuple(unused),
    )


def _read_all(files: list[Path]) -> tuple[list[TensorEntry], tuple[tuple[str, str], ...]]:
    """The tensors of several safetensors files in order, and their metadata, first word wins."""
    entries: list[TensorEntry] = []
    metadata: dict[str, str] = {}
    for file in files:
        tensors, pairs = read_safetensors(file)
        entries.extend(tensors)
        if len(entries) > MAX_TENSORS:
            raise MalformedCheckpoint(
                f"{len(entries)} tensors up to here", file=file, expected=f"at most {MAX_TENSORS}"
            )
        metadata = {**dict(pairs), **metadata}
    return entries, tuple(metadata.items())


def _without_duplicates(
    entries: Iterable[TensorEntry], preferred: frozenset[tuple[str, str]] = frozenset()
) -> tuple[tuple[TensorEntry, ...], tuple[tuple[str, str], ...]]:
    """One entry per name (a preferred (name, file), else the first), and the others' name, file."""
    kept: dict[str, TensorEntry] = {}
    duplicates = []
    for entry in entries:
        before = kept.setdefault(entry.name, entry)
        if before is entry:
            continue
        if (entry.name, entry.file) in preferred and (before.name, before.file) not in preferred:
            kept[entry.name], entry = entry, before
        duplicates.append((entry.name, entry.file))
    return tuple(kept.values()), tuple(duplicates)


def _read_sharded(index_file: Path, unused: Iterable[str]) -> CheckpointIndex:
    """The shards that an index file names, as far as they are there."""
    places, declared_bytes = read_weight_map(index_file)
    folder = index_file.parent
    shards = {name: str(folder / name) for name in sorted(set(places.values()))}
    present = {name: folder / name for name in shards if _is_there(folder / name)}
    entries, metadata = _read_all(list(present.values()))
    tensors, differences = _as_listed(entries, {n: shards[file] for n, file in places.items()})
    return CheckpointIndex(
        format="safetensors",
        tensors=tensors,
        files=tuple(shards[name] for name in present),
        metadata=metadata,
        missing_files=tuple(shards[name] for name in shards if name not in present),
        absent_tensors=differences[0],
        unlisted_tensors=differences[1],
        duplicate_tensors=differences[2],
        unused_files=tuple(name for name in unused if name not in shards),
        declared_bytes=declared_bytes,
    )


Pairs = tuple[tuple[str, str], ...]


def _as_listed(
    entries: list[TensorEntry], files: Mapping[str, str]
) -> tuple[tuple[TensorEntry, ...], tuple[Pairs, Pairs, Pairs]]:
    """One entry per name, and the absent, unlisted and duplicate (name, file) pairs.

    `files` is what the index file says: the path of each tensor's shard.
    """
    if len(entries) == len(files) and {entry.name: entry.file for entry in entries} == files:
        return tuple(entries), ((), (), ())  # as it should be, and told in a fifth of the time
    listed = frozenset(files.items())
    stored = {(entry.name, entry.file) for entry in entries}
    kept, duplicates = _without_duplicates(entries, preferred=listed)
    return kept, (tuple(sorted(listed - stored)), tuple(sorted(stored - listed)), duplicates)

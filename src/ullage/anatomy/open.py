"""What lies at a path: `open_model` finds the files, `load` makes a `Model` of them.

Opens directories, configuration files, GGUF and safetensors files. Only regular files directly in
the given directory are opened (symbolic links of a download cache included), each up to a cap.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ullage.anatomy.checkpoint import CheckpointIndex
from ullage.anatomy.config.keys import parse_json
from ullage.anatomy.config.read import read_config
from ullage.anatomy.files.index import choose_gguf, gguf_index, read_checkpoint, read_gguf_parts
from ullage.anatomy.spec import Anatomy
from ullage.errors import BadUsage, MalformedCheckpoint, MalformedConfig

MAX_CONFIG_BYTES = 8 << 20
MAX_TEXT_BYTES = 32 << 20
MAX_LISTED = 100_000
QUANT_SIDE_NAME = "hf_quant_config.json"
# Keys of which a configuration of a model has at least one, in any spelling.
_SIGNS = frozenset(
    (
        "model_type",
        "hidden_size",
        "d_model",
        "n_embd",
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "text_config",
        "llm_config",
        "language_config",
        "thinker_config",
    )
)
Kind = Literal["directory", "config", "gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model. Parsed JSON objects are None where the file is absent.

    `config_file` is the path of the configuration as shown in messages. `tokenizer_json_bytes` is
    the size of tokenizer.json, which is not parsed here. `other_files` lists the names of the
    directory's remaining files (*.bin, *.py, …) in order.
    """

    path: Path
    kind: Kind
    config: Mapping[str, object] | None
    config_file: str
    quant_side: Mapping[str, object] | None = None
    quant_side_file: str | None = None
    generation_config: Mapping[str, object] | None = None
    tokenizer_config: Mapping[str, object] | None = None
    special_tokens_map: Mapping[str, object] | None = None
    tokenizer_json_bytes: int | None = None
    chat_template: str | None = None
    chat_template_file: str | None = None
    other_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """A model as ullage knows it: its files, its anatomy, and its tensors where headers exist."""

    files: ModelFiles
    anatomy: Anatomy
    checkpoint: CheckpointIndex | None


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a regular file of at most `max_bytes`.

    Raises:
        MalformedConfig: not a regular file, unreadable, too large, or not UTF-8.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            info = os.fstat(stream.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise MalformedConfig("not a regular file", file=path)
            data = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise MalformedConfig(f"cannot be read: {reason}", file=path) from None
    if len(data) > max_bytes:
        raise MalformedConfig(
            f"larger than {max_bytes} bytes", file=path, expected="a smaller text file"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedConfig(f"not UTF-8 at byte {error.start}", file=path) from None


def begins_with(path: Path, mark: str) -> bool:
    """Whether the first 100 bytes of a file hold `mark`; False where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return mark.encode() in stream.read(100)
    except OSError:
        return False


def read_json_object(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> Mapping[str, object]:
    """The JSON object that a file holds; MalformedConfig when it holds anything else."""
    value = parse_json(read_text(path, max_bytes), file=str(path))
    if not isinstance(value, dict):
        raise MalformedConfig(
            f"holds a JSON {type(value).__name__}", file=path, expected="a JSON object"
        )
    return value


def open_model(path: str | os.PathLike[str]) -> ModelFiles:
    """Find the files of the model at `path`: a directory, a JSON, GGUF or safetensors file.

    Raises:
        BadUsage: nothing there, or nothing that holds a model.
        MalformedConfig: a file there cannot be read.
    """
    place = Path(path)
    try:
        mode = place.stat().st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadUsage(
            f"cannot be opened: {reason}", file=place, expected="a model's directory or file"
        ) from None
    if stat.S_ISDIR(mode):
        return _open_directory(place)
    if not stat.S_ISREG(mode):
        raise BadUsage("not a regular file", file=place, expected="a model's directory or file")
    if _is_gguf(place):
        return ModelFiles(place, "gguf", None, str(place))
    if place.suffix == ".safetensors":
        beside = place.parent / "config.json"
        if beside.is_file():
            config, side, side_name = _config_and_side(beside)
            return ModelFiles(place, "safetensors", config, str(beside), side, side_name)
        return ModelFiles(place, "safetensors", None, str(place))
    config, side, side_name = _config_and_side(place)
    return ModelFiles(place, "config", config, str(place), side, side_name)


def load(path: str | os.PathLike[str]) -> Model:
    """Everything that ullage can know of the model at `path` without running it.

    Raises:
        BadInput: a file is missing, malformed, or describes a model that cannot be priced.
    """
    files = open_model(path)
    if files.config is None:
        return _load_headers(files)
    anatomy = read_config(files.config, file=files.config_file, quant_side_file=files.quant_side)
    index = _checkpoint(files)
    if index is not None and index.format == "gguf":
        # config.json knows nothing of how a GGUF file beside it is stored.
        from ullage.anatomy.gguf.stored_types import as_stored

        anatomy = as_stored(anatomy, index)
    return Model(files, anatomy, index)


def _checkpoint(files: ModelFiles) -> CheckpointIndex | None:
    return None if files.kind == "config" else read_checkpoint(files.path)


def _load_headers(files: ModelFiles) -> Model:
    """A model without any config.json: GGUF says everything itself, safetensors by shapes."""
    if files.kind == "gguf":
        headers, missing = read_gguf_parts(files.path)
        if missing:
            raise MalformedCheckpoint(
                f"{len(missing)} parts of this model are not there, the first is {missing[0]}",
                file=files.path,
                expected="all parts, since only together they tell what the model is",
            )
        # Six modules of tables, of which only GGUF files need any.
        from ullage.anatomy.gguf.config import as_headers_say, config_from_gguf
        from ullage.anatomy.gguf.stored_types import as_stored

        found = config_from_gguf(headers)
        template = headers[0].metadata.get("tokenizer.chat_template")
        files = replace(
            files,
            config=found.config,
            chat_template=template if isinstance(template, str) else None,
            chat_template_file=str(files.path) if isinstance(template, str) else None,
        )
        anatomy = as_headers_say(read_config(found.config, file=files.config_file), found)
        index = gguf_index((headers, missing))
        return Model(files, as_stored(anatomy, index), index)
    stored = read_checkpoint(files.path)
    if stored is None:
        raise BadUsage(
            "holds no configuration", file=files.path, expected="a config.json beside the weights"
        )
    # Rarely needed, and it brings the whole comparison of names along.
    from ullage.anatomy.infer import anatomy_from_headers

    inferred = anatomy_from_headers(stored)
    return Model(replace(files, config=inferred.config), inferred.anatomy, stored)


def _is_gguf(path: Path) -> bool:
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def _config_and_side(
    path: Path,
) -> tuple[Mapping[str, object], Mapping[str, object] | None, str | None]:
    """A configuration file and the quantisation side file beside it (NAME_ kept)."""
    config = _embedded(read_json_object(path, MAX_CONFIG_BYTES), path)
    prefix = path.name.removesuffix("config.json") if path.name.endswith("config.json") else None
    if prefix is None or path.name.endswith(QUANT_SIDE_NAME):
        return config, None, None
    side = path.with_name(prefix + QUANT_SIDE_NAME)
    if not side.is_file():
        return config, None, None
    return config, read_json_object(side, MAX_CONFIG_BYTES), side.name


def _embedded(data: Mapping[str, object], path: Path) -> Mapping[str, object]:
    """The configuration inside any JSON object: the outermost object that looks like one."""
    level: list[Mapping[str, object]] = [data]
    for _ in range(8):
        for candidate in level:
            if not _SIGNS.isdisjoint(candidate):
                return candidate
        level = [v for item in level for v in item.values() if isinstance(v, Mapping)][:1000]
        if not level:
            break
    if isinstance(data.get("weight_map"), Mapping):
        raise MalformedConfig(
            "an index of weight files", file=path, expected="the model's config.json or directory"
        )
    raise MalformedConfig(
        "holds no model configuration", file=path, expected="keys such as model_type, hidden_size"
    )


def _open_directory(place: Path) -> ModelFiles:
    names = sorted(_file_names(place))
    known: set[str] = set()

    def json_object(name: str) -> Mapping[str, object] | None:
        if name not in names:
            return None
        known.add(name)
        return read_json_object(place / name)

    if "config.json" not in names:
        return _without_config(place, names)
    known.add("config.json")
    config, side, side_name = _config_and_side(place / "config.json")
    known.add(side_name or "config.json")
    tokenizer_config = json_object("tokenizer_config.json")
    template, template_file = _chat_template(place, names, tokenizer_config)
    known.add(template_file or "config.json")
    tokenizer_bytes = None
    if "tokenizer.json" in names:
        known.add("tokenizer.json")
        tokenizer_bytes = (place / "tokenizer.json").stat().st_size
    return ModelFiles(
        path=place,
        kind="directory",
        config=config,
        config_file=str(place / "config.json"),
        quant_side=side,
        quant_side_file=side_name,
        generation_config=json_object("generation_config.json"),
        tokenizer_config=tokenizer_config,
        special_tokens_map=json_object("special_tokens_map.json"),
        tokenizer_json_bytes=tokenizer_bytes,
        chat_template=template,
        chat_template_file=template_file,
        other_files=tuple(n for n in names if n not in known),
    )


def _without_config(place: Path, names: list[str]) -> ModelFiles:
    """A directory with weights only: a GGUF (or its first part), or safetensors."""
    gguf = choose_gguf(place, names)
    if gguf is not None:
        return ModelFiles(gguf, "gguf", None, str(gguf), other_files=tuple(names))
    if any(n.endswith(".safetensors") for n in names):
        return ModelFiles(place, "safetensors", None, str(place), other_files=tuple(names))
    if os.path.lexists(place / "config.json"):  # a pipe, a socket, a directory, a dangling link
        raise BadUsage("not a regular file", file=place / "config.json", expected="a config.json")
    configs = [n for n in names if n.endswith("config.json") and not n.endswith(QUANT_SIDE_NAME)]
    raise BadUsage(
        f"a directory without config.json{' but with ' + configs[0] if configs else ''}",
        file=place,
        expected="config.json, a .gguf or .safetensors file",
    )


def _file_names(place: Path) -> list[str]:
    names: list[str] = []
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if len(names) >= MAX_LISTED:
                    raise BadUsage(f"more than {MAX_LISTED} files", file=place)
                if entry.is_file():
                    names.append(entry.name)
    except OSError as error:
        raise BadUsage(f"cannot be listed: {error.strerror}", file=place) from None
    return names


def _chat_template(
    place: Path, names: list[str], tokenizer_config: Mapping[str, object] | None
) -> tuple[str | None, str | None]:
    """The default chat template and the file it lies in; newer files win, as in transformers."""
    if "chat_template.jinja" in names:
        return read_text(place / "chat_template.jinja"), "chat_template.jinja"
    if "chat_template.json" in names:
        held = read_json_object(place / "chat_template.json").get("chat_template")
        if isinstance(held, str):
            return held, "chat_template.json"
    held = (tokenizer_config or {}).get("chat_template")
    if isinstance(held, str):
        return held, "tokenizer_config.json"
    if isinstance(held, list):  # several named templates
        for item in held:
            if isinstance(item, Mapping) and item.get("name") == "default":
                text = item.get("template")
                if isinstance(text, str):
                    return text, "tokenizer_config.json"
    return None, None

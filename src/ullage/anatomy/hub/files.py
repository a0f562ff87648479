"""A repository of a hub → a temporary directory: its small files, the headers of its weights.

Weights there are holes behind their headers, of the size that the hub states, so that the readers
check lengths as always; the directory goes away with the process. No tensor is fetched.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from ullage.anatomy.files.index import (
    choose_gguf,
    is_adapter_or_projector,
    is_consolidated,
    parts_of_split,
)
from ullage.anatomy.files.safetensors import MAX_HEADER_BYTES
from ullage.anatomy.files.weight_map import MAX_INDEX_BYTES, read_weight_map
from ullage.anatomy.gguf.header import MAX_HEADER_BYTES as MAX_GGUF_HEADER_BYTES
from ullage.anatomy.gguf.header import gguf_header_bytes
from ullage.anatomy.hub.client import HubClient
from ullage.anatomy.hub.ids import HubId
from ullage.anatomy.open import MAX_CONFIG_BYTES, MAX_TEXT_BYTES
from ullage.errors import BadUsage, MalformedCheckpoint

INDEX_SUFFIX = ".safetensors.index.json"
SMALL_FILES = {
    "config.json": MAX_CONFIG_BYTES,
    "hf_quant_config.json": MAX_CONFIG_BYTES,
    "generation_config.json": MAX_TEXT_BYTES,
    "tokenizer_config.json": MAX_TEXT_BYTES,
    "special_tokens_map.json": MAX_TEXT_BYTES,
    "chat_template.json": MAX_TEXT_BYTES,
    "chat_template.jinja": MAX_TEXT_BYTES,
}
# Rules only need to know that these exist: an empty file of that name stands for each.
NAMES_ONLY = (".py", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".safetensors", ".gguf")
FIRST_GGUF_BYTES = 1 << 16
MAX_FILES = 10_000
NUM_CONNECTIONS = 8


def fetch_headers(endpoint: str, wanted: HubId) -> Path:
    """The directory (or GGUF file in it) that stands for `wanted`.

    Raises BadUsage when the hub refuses or holds no model, Unreachable when it does not answer,
    MalformedCheckpoint when a header lies.
    """
    client = HubClient(endpoint, wanted)
    names = [name for name in client.list_files() if _is_plain(name)]
    if len(names) > MAX_FILES:
        raise BadUsage(f"more than {MAX_FILES} files", file=str(wanted))
    root = Path(tempfile.mkdtemp(prefix="ullage-hub-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    folder = root / f"{wanted.organisation}--{wanted.name}"
    folder.mkdir()
    if wanted.file is not None:
        if wanted.file not in names:
            raise BadUsage(f"the repository has no file {wanted.file}", file=str(wanted))
        _fetch(client, folder, parts_of_split(wanted.file, names), _gguf_header)
        return folder / wanted.file
    small = [name for name in names if name in SMALL_FILES or name.endswith(INDEX_SUFFIX)]
    _fetch(client, folder, small, _small)
    if "tokenizer.json" in names:
        _hole(folder / "tokenizer.json", b"", client.part("tokenizer.json", 0, 0)[1])
    for name in names:
        if name.endswith(NAMES_ONLY):
            (folder / name).touch()
    _fetch_weights(client, folder, names)
    return folder


def _is_plain(name: str) -> bool:
    return (
        0 < len(name.encode()) <= 255
        and name not in (".", "..")
        and not any(c in name for c in "/\\\0")
        and name.isprintable()
    )


def _fetch_weights(client: HubClient, folder: Path, names: list[str]) -> None:
    """The headers of the files that `read_checkpoint` would open in such a directory."""
    chosen = [n for n in names if not is_consolidated(n)] or names
    if not any(n.endswith((".safetensors", INDEX_SUFFIX)) for n in chosen):
        chosen = names
    indexes = sorted(n for n in chosen if n.endswith(INDEX_SUFFIX))
    files = [n for n in chosen if n.endswith(".safetensors") and not is_adapter_or_projector(n)]
    if indexes:
        main = "model" + INDEX_SUFFIX
        places, _ = read_weight_map(folder / (main if main in indexes else indexes[0]))
        files = sorted(set(places.values()) & set(names))
        for absent in set(places.values()) - set(names):
            (folder / absent).unlink(missing_ok=True)
    elif "model.safetensors" in files:
        files = ["model.safetensors"]
    if files:
        _fetch(client, folder, files, _safetensors_header)
        return
    model = choose_gguf(Path(str(client.wanted)), names)
    if model is not None:
        _fetch(client, folder, parts_of_split(model.name, names), _gguf_header)


def _fetch(
    client: HubClient,
    folder: Path,
    names: Iterable[str],
    one: Callable[[HubClient, Path], None],
) -> None:
    """Runs `one` on each file, several at once; the first error is raised and ends the rest."""
    files = [folder / name for name in names]
    if len(files) < 2:
        for file in files:
            one(client, file)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        waiting = [pool.submit(one, client, file) for file in files]
        try:
            for done in waiting:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _small(client: HubClient, file: Path) -> None:
    file.write_bytes(client.whole(file.name, SMALL_FILES.get(file.name, MAX_INDEX_BYTES)))


def _safetensors_header(client: HubClient, file: Path) -> None:
    raw, total = client.part(file.name, 0, 7)
    length = int.from_bytes(raw, "little")
    # What is wrong with a lying length, the reader says better: it gets the file as far as it goes.
    if len(raw) == 8 and length <= MAX_HEADER_BYTES and 0 < length <= total - 8:
        header, again = client.part(file.name, 8, 7 + length)
        if again != total:
            raise _changed(client, file)
        raw += header
    _hole(file, raw, total)


def _gguf_header(client: HubClient, file: Path) -> None:
    """Twice as much each time, until the header is whole."""
    have, wanted = b"", FIRST_GGUF_BYTES
    while True:
        more, total = client.part(file.name, len(have), wanted - 1)
        have += more
        file.write_bytes(have)
        if gguf_header_bytes(file) is not None or len(have) == total:
            break
        if len(have) >= MAX_GGUF_HEADER_BYTES:
            raise MalformedCheckpoint(
                f"the header is longer than {MAX_GGUF_HEADER_BYTES} bytes", file=file
            )
        wanted = min(len(have) * 2, MAX_GGUF_HEADER_BYTES)
    _hole(file, have, total)


def _changed(client: HubClient, file: Path) -> BadUsage:
    return BadUsage(f"{file.name} changed while it was read", file=str(client.wanted))


def _hole(file: Path, start: bytes, total: int) -> None:
    """A file of `total` bytes that begins with `start`; the rest takes no room."""
    try:
        with file.open("wb") as stream:
            stream.write(start)
            stream.truncate(max(total, len(start)))
    except OSError as error:
        raise BadUsage(f"cannot be written: {error.strerror}", file=file) from None

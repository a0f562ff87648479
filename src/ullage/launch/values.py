"""Numbers as command lines and manifests write them: sizes, durations, versions of images.

Holds pure parsing; each function says what it does not accept.
"""

from __future__ import annotations

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_QUANTITIES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_DOCKER = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 24


def parse_integer(text: str) -> int:
    """An integer as vLLM 0.32 reads one: `8192`, `8k` (decimal), `8K` (binary), `25.6g`.

    Raises ValueError. vLLM refuses a fraction before a binary suffix, and so do we
    (vllm/utils/argparse_utils.py, human_readable_int).
    """
    text = text.strip()
    number, suffix = text[:-1], text[-1:]
    if suffix in BINARY_SUFFIXES and suffix:
        return int(number) * BINARY_SUFFIXES[suffix]
    if suffix in SUFFIXES and suffix:
        if not number.replace(".", "", 1).isdecimal():
            raise ValueError(text)
        return int(float(number) * SUFFIXES[suffix])
    return int(text)


def _split(text: str) -> tuple[float, str] | None:
    """(number, unit) of `1.5Gi`, None when there is no number or it is absurdly long."""
    text = text.strip()
    if len(text) > _LONGEST:
        return None
    end = len(text)
    while end and not (text[end - 1].isascii() and text[end - 1].isdigit()):
        end -= 1
    number = text[:end]
    if not number.isascii() or not number.replace(".", "", 1).isdecimal():
        return None
    return float(number), text[end:]


def parse_quantity(text: str) -> int | None:
    """Bytes of a Kubernetes quantity (`16Gi`, `500M`), None when it is none."""
    parts = _split(text)
    if parts is None or parts[1] not in _QUANTITIES:
        return None
    return int(parts[0] * _QUANTITIES[parts[1]])


def parse_bytes(text: str) -> int | None:
    """Bytes as docker reads them (`16g`, `512mb`: powers of 1024), None when it is no size."""
    parts = _split(text.lower())
    if parts is None or parts[1] not in _DOCKER:
        return None
    return int(parts[0] * _DOCKER[parts[1]])


def parse_duration(text: str) -> float | None:
    """Seconds of a compose duration (`1m30s`, `10s`), None when it is none."""
    total, number, unit = 0.0, "", ""
    for character in f"{text.strip()[:_LONGEST]}0":
        if character.isdecimal() or character == ".":
            if unit:
                parts = _split(number)
                if unit not in _SECONDS or parts is None:
                    return None
                total += parts[0] * _SECONDS[unit]
                number, unit = "", ""
            number += character
        else:
            unit += character
    return total if number == "0" else None


def image_version(image: str | None) -> str | None:
    """The version that an image's tag says (`vllm/vllm-openai:v0.32.0-cu129` → `0.32.0`).

    None without a tag, and for tags that name no version (`latest`, `nightly-…`).
    """
    if image is None:
        return None
    tag = image.split("@")[0].rsplit("/", 1)[-1].partition(":")[2].removeprefix("v")
    numbers = tag.split("-")[0].split(".post")[0]
    parts = numbers.split(".")
    if 2 <= len(parts) <= 3 and all(part.isascii() and part.isdecimal() for part in parts):
        return numbers
    return None

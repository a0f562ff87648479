"""Rules about what a checkpoint says of itself: dtypes of its parts, licence.

Holds statements set against each other; what is stored is `checkpoint.py`'s and `tensors.py`'s.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity

DTYPE_KEYS = ("dtype", "torch_dtype")
"""The newer key first: transformers reads the older one only where the newer is absent."""

MAX_DEPTH = 4
LICENCE_WORDS = ("license", "licence", "copying", "notice")
MAX_README_BYTES = 64 << 10


def _dtypes(config: Mapping[str, object], place: str, depth: int) -> Iterator[tuple[str, str]]:
    """(dotted key, dtype) of a configuration and of the parts inside it."""
    for key in DTYPE_KEYS:
        value = config.get(key)
        if isinstance(value, str) and value != "auto":
            yield place + key, value.removeprefix("torch.")
            break
    if depth < MAX_DEPTH:
        for key, inner in config.items():
            is_part = key.endswith("_config") and key != "quantization_config"
            if is_part and isinstance(inner, Mapping):
                yield from _dtypes(inner, f"{place}{key}.", depth + 1)


def _nested_dtypes(subject: Subject) -> Verdict:
    if not subject.config:
        return NotEvaluable(("config.json",))
    said = list(_dtypes(subject.config, "", 0))
    # vLLM looks at the root, then at the language model, then at the towers.
    said.sort(key=lambda item: ("." in item[0], not item[0].startswith(subject.prefix or ".")))
    if not said:
        return NotEvaluable(("a dtype in config.json",))
    facts = tuple(Evidence(key, dtype, "", f"config: {key}") for key, dtype in said)
    first, loaded = said[0]
    other = next(((key, dtype) for key, dtype in said if dtype != loaded), None)
    if other is None:
        return Clear(facts)
    towers = all(
        dtype == loaded or key.startswith(("vision", "audio", "encoder")) for key, dtype in said
    )
    return Fired(
        f"config.json says {first} {loaded} and {other[0]} {other[1]}: vLLM 0.32 loads every part "
        f"in the first that it finds ({loaded}), transformers each part in its own, and memory and "
        "results differ.",
        f"Set every dtype of config.json to the one that the weights are stored in, or pass "
        f"--dtype {loaded} to say which is meant.",
        facts,
        Severity.info if towers else None,
    )


def _front_matter(path: Path) -> list[str] | None:
    """Lines between the two --- at the head of a README; [] without any, None if unreadable."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return None
            lines = stream.read(MAX_README_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return None
    if not lines or lines[0].strip() != "---":
        return []
    for number, line in enumerate(lines[1:], 1):
        if line.strip() == "---":
            return lines[1:number]
    return []


def _value(lines: list[str], key: str) -> str | None:
    """The value of a top-level key: on its line, or the first item of the list below it."""
    for number, line in enumerate(lines):
        if line.startswith(f"{key}:"):
            below = lines[number + 1].strip() if number + 1 < len(lines) else ""
            text = line[len(key) + 1 :].strip() or (below[1:] if below.startswith("-") else "")
            return text.strip(" \"'[]")[:80] or None
    return None


def _licence(subject: Subject) -> Verdict:
    files = subject.model.files
    if files.kind != "directory":
        return NotEvaluable(("the directory of the checkpoint",))
    texts = [
        name for name in files.other_files if name.lower().startswith(LICENCE_WORDS)
        and not name.lower().endswith((".py", ".json"))
    ]  # fmt: skip
    lines: list[str] = []
    if "README.md" in files.other_files:
        read = _front_matter(files.path / "README.md")
        if read is None:
            return NotEvaluable(("a README.md that can be read",))
        lines = read
    name = _value(lines, "license_name") or _value(lines, "license")
    gates = [line.split(":")[0] for line in lines if line.startswith("extra_gated_")]
    facts = (
        Evidence("licence files", ", ".join(texts[:3]) or None, "", "file names"),
        Evidence("license", name, "", "README.md"),
        Evidence("gate", gates[0] if gates else None, "", "README.md"),
    )
    if gates:
        return Fired(
            f"Access to this checkpoint is gated ({gates[0]} in README.md"
            f"{f', licence {name}' if name else ''}): whoever downloads it must first accept "
            "terms, and a server that fetches it needs a token of an account that did.",
            "Accept the terms for the account whose HF_TOKEN the server has, or serve from this "
            "directory; read what the terms say of passing weights on.",
            facts,
        )
    if texts or name:
        return Clear(facts)
    return Fired(
        "Neither a licence file nor a license line in README.md comes with these weights: nothing "
        "here says who may use them and for what.",
        "Put the LICENSE of the model (or of the model that it was made from) beside config.json, "
        "or a license line at the head of README.md.",
        facts,
    )


RULES = (
    Rule(
        id="A129",
        title="dtypes of the parts of the configuration",
        severity=Severity.warning,
        category="checkpoint",
        why="A configuration of several parts may say a dtype in each. Engines take the first that "
        "they find, so that parts which disagree are loaded otherwise than their authors meant.",
        fix="Say one dtype, that of the stored weights.",
        source="vllm 0.32: transformers_utils/model_arch_config_convertor.py, get_torch_dtype",
        example="dtype float16 beside text_config.dtype bfloat16",
        check=_nested_dtypes,
    ),
    Rule(
        id="A130",
        title="Licence of the weights",
        severity=Severity.info,
        category="safety",
        why="Weights without a licence may not be used at all in many companies, and gated ones "
        "cannot be fetched by a server that has no token.",
        fix="Keep LICENSE and README.md beside the weights; give the server a token where needed.",
        source="model cards of the Hugging Face hub: license, extra_gated_* in the front matter",
        example="a directory of weights without LICENSE and without license in README.md",
        check=_licence,
    ),
)

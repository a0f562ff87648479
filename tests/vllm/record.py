"""Records what vLLM answers for a chosen list of cases, for the default tests to compare with.

    .venv/bin/python tests/vllm/record.py [name …]

asks the vLLM of tools/vllm_setup.sh what tests/planning/fixtures/vllm-0.32-cpu.jsonl lacks (with
names: those cases anew; remove the file to ask all). Cases are drawn from seeds by `draws.py`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ask import ask_vllm
from compare import beyond_sizing, differences
from draws import case_of, sources

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "planning" / "fixtures" / "vllm-0.32-cpu.jsonl"

CHOSEN = {
    # full attention
    "Qwen--Qwen3-8B": (1, 2),
    "Qwen--Qwen3-VL-8B-Instruct": (1,),
    "MiniMaxAI--MiniMax-M2.5": (1,),
    "library--gpt2": (1,),
    "library--opt": (1,),
    # windows beside full attention, windows only, chunks
    "openai--gpt-oss-120b": (1, 2, 3),
    "library--gemma2": (1, 2),
    "library--gemma3_text": (1, 2),
    "library--cohere2": (1,),
    "library--olmo3": (1,),
    "library--exaone4": (1,),
    "library--mistral": (1, 2),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (1, 2),
    # separate head sizes, shared KV
    "google--gemma-4-26B-A4B": (1, 2, 3),
    "library--gemma4_text": (1, 2),
    "library--gemma3n_text": (1, 2),
    # latent attention
    "deepseek-ai--DeepSeek-V3": (1, 2),
    "moonshotai--Kimi-K2-Instruct": (1,),
    "library--deepseek_v2": (1,),
    # state-space and delta-net hybrids
    "Qwen--Qwen3.5-27B": (1, 2, 3),
    "Qwen--Qwen3.5-397B-A17B": (1,),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (1, 2),
    "nvidia--Nemotron-H-56B-Base-8K": (1,),
    "library--qwen3_next": (1, 2),
    "library--falcon_h1": (1, 2),
    "library--jamba": (1, 2),
    "library--granitemoehybrid": (1,),
    "library--lfm2": (1, 2),
    # no attention, no decoder
    "library--mamba": (1, 2),
    "library--mamba2": (1, 2),
    "library--falcon_mamba": (1,),
    "library--bert": (1,),
}

EXTRA = (
    # blocks that the CPU's kernel does not take, alone and beside windows and states
    ("library--llama", {"block_size": 16}),
    ("library--smollm3", {"block_size": 48}),
    ("library--gemma2", {"block_size": 48, "dtype": "bfloat16"}),
    ("openai--gpt-oss-120b", {"block_size": 16}),
    ("Qwen--Qwen3.5-27B", {"block_size": 48, "enable_prefix_caching": True}),
    # states without attention, with and without cached prefixes, in blocks asked for or not
    ("library--mamba", {"enable_prefix_caching": True, "block_size": None}),
    ("library--mamba2", {"enable_prefix_caching": True}),
    ("library--mamba2", {"enable_prefix_caching": True, "block_size": None, "dtype": "float32"}),
    ("library--falcon_mamba", {"enable_prefix_caching": True, "block_size": 64}),
    ("library--falcon_mamba", {"enable_prefix_caching": True, "block_size": None}),
    # nothing in the configuration limits the length
    ("library--mamba2", {"max_model_len": 4096}),
    ("library--mamba", {"max_model_len": None}),
    ("library--mamba", {"max_model_len": -1}),
    # chunks beside full attention, where the chunk bounds what is kept and where it does not
    ("library--llama4_text", {"max_model_len": 4096}),
    ("library--llama4_text", {"max_model_len": 16384, "kv_cache_memory_bytes": 900 << 20}),
    ("library--llama4_text", {"max_model_len": -1, "enable_prefix_caching": False}),
    # prefix caching where nothing is cached
    ("library--bert", {"enable_prefix_caching": True}),
    ("library--roberta", {"enable_prefix_caching": True, "block_size": None}),
    ("library--roberta", {"enable_prefix_caching": False}),
    # a pool that does not hold one request; lengths fitted to the pool
    ("Qwen--Qwen3-8B", {"kv_cache_memory_bytes": 3 << 20, "max_model_len": 4096}),
    ("google--gemma-4-26B-A4B", {"max_model_len": -1}),
    ("nvidia--Nemotron-H-56B-Base-8K", {"max_model_len": -1}),
    ("deepseek-ai--DeepSeek-V3", {"max_model_len": -1}),
)
"""Limits that are put over those drawn from seed 0, for what a draw may miss; None: not given."""


def main(names: list[str]) -> None:
    readers = dict(sources())
    cases = [
        case_of(name, readers[name](), seed).as_json()
        for name, seeds in CHOSEN.items()
        for seed in seeds
        if not names or any(part in name for part in names)
    ]
    for name, limits in EXTRA:
        if not names or any(part in name for part in names):
            case = case_of(name, readers[name](), 0).as_json()
            given = case["limits"] | {"kv_cache_dtype": "auto", "dtype": "auto"} | limits
            case["limits"] = {key: value for key, value in given.items() if value is not None}
            case["name"] = f"{name}--{'-'.join(f'{k}={v}' for k, v in limits.items())}"
            cases.append(case)
    python = Path(os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32").expanduser()
    recorded = {}
    if FIXTURES.exists():
        lines = map(json.loads, FIXTURES.read_text().splitlines())
        recorded = {line["case"]["name"]: line for line in lines}
    if not names:  # an interrupted recording goes on; what was drawn otherwise is asked anew
        named = {case["name"]: case for case in cases}
        recorded = {n: line for n, line in recorded.items() if line["case"] == named.get(n)}
        cases = [case for case in cases if case["name"] not in recorded]
    oracle = ROOT / "tools" / "vllm_oracle.py"
    for case, answer in zip(cases, ask_vllm(python / "bin/python", oracle, cases), strict=True):
        seconds = answer.pop("seconds", None)
        assert answer.pop("name") == case["name"]
        if beyond_sizing(answer):
            print(f"not startable here: {case['name']}: {answer['refused'][:150]}", flush=True)
            continue
        recorded[case["name"]] = {"case": case, "answer": answer}
        _write(recorded)
        try:
            lines = differences(case, answer)
        except Exception as error:  # recording goes on; the tests will say so
            lines = [repr(error)]
        print(f"{'differs' if lines else 'equal':8}{case['name']} ({seconds} s)", flush=True)
        for line in lines:
            print(f"        {line}", flush=True)


def _write(recorded: dict[str, dict]) -> None:
    text = "".join(json.dumps(recorded[name], sort_keys=True) + "\n" for name in sorted(recorded))
    temporary = FIXTURES.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(FIXTURES)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Measures `ullage adapter check` of a 1 GB adapter against a 405 B base, from headers alone.

Run with the environment's Python: `python benchmarks/adapters/measure.py [RUNS]`. The adapter is a
sparse file of the right size: every module of 126 layers, rank 13 in bfloat16. Prints wall seconds
of the whole command (median and worst) and the peak of its memory.
"""

from __future__ import annotations

import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS, HIDDEN, INNER, KV, VOCABULARY, RANK = 126, 16384, 53248, 1024, 128256, 13
BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 128,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
SIDES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER), "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}  # fmt: skip


def make(folder: Path) -> tuple[Path, Path, int]:
    """The base's configuration, the adapter's folder and its bytes."""
    base = folder / "config.json"
    base.write_text(json.dumps(BASE))
    adapter = folder / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 26, "target_modules": "all-linear",
              "task_type": "CAUSAL_LM", "base_model_name_or_path": None}  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    offset = 0
    for layer in range(LAYERS):
        for name, (inner, outer) in SIDES.items():
            stem = f"base_model.model.model.layers.{layer}.{name}.lora_"
            for letter, shape in (("A", [RANK, inner]), ("B", [outer, RANK])):
                size = 2 * shape[0] * shape[1]
                header[f"{stem}{letter}.weight"] = {
                    "dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]
                }  # fmt: skip
                offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file = adapter / "adapter_model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        start = stream.tell()
        os.ftruncate(stream.fileno(), start + offset)
        for entry in header.values():
            begin = entry["data_offsets"][0]  # type: ignore[index]
            stream.seek(start + begin)
            stream.write(b"\x3c\x3c")
    return base, adapter, offset


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        base, adapter, size = make(Path(name))
        command = [sys.executable, "-m", "ullage", "adapter", "check", str(adapter), "--base",
                   str(base), "--max-lora-rank", "16", "--output", "json"]  # fmt: skip
        seconds, busy, peak = [], [], 0
        for _ in range(runs):
            started = time.monotonic()
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                printed = process.stdout.read()  # type: ignore[union-attr]
                usage = os.wait4(process.pid, 0)[2]
            peak = max(peak, usage.ru_maxrss)
            busy.append(usage.ru_utime + usage.ru_stime)
            seconds.append(time.monotonic() - started)
        document = json.loads(printed)
        result = {
            "adapter_bytes": size,
            "modules": document["total"],
            "verdict": document["verdict"],
            "wall_s_median": round(statistics.median(seconds), 3),
            "wall_s_worst": round(max(seconds), 3),
            "cpu_s_median": round(statistics.median(busy), 3),
            "peak_rss_bytes": peak * 1024,
            "runs": runs,
        }
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

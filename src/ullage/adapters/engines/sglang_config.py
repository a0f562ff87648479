"""What SGLang 0.5.23 makes of an adapter's configuration: what it refuses, and its target modules.

Holds srt/lora/lora_config.py, the checks and the limits of srt/lora/lora_manager.py, and the names
of srt/lora/utils.py. Weights are `sglang.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ullage.adapters.base import BaseModule, BaseTree
from ullage.adapters.engines.sglang_fuse import Refused
from ullage.adapters.verdict import ServeOptions
from ullage.anatomy.adapters.adapter import Adapter

_ADAPTER = "adapter"
"""What stands for the adapter's name in messages."""

VOCABULARY = ("embed_tokens", "lm_head")
# srt/lora/utils.py, get_normalized_target_modules.
NORMAL = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "vocab_emb": "embed_tokens",
    "embeddings": "embed_tokens", "word_embeddings": "embed_tokens", "output": "lm_head",
    "unembed_tokens": "lm_head", "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa", "wq_b": "indexer.wq_b", "wk": "indexer.wk",
    "weights_proj": "indexer.weights_proj",
}  # fmt: skip
# get_default_hidden_dim; and what classes with sizes of their own take besides
# (_KNOWN_LORA_TARGET_MODULES).
_SIZED = frozenset((
    "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "fused_qkv_a_proj_with_mqa", "q_b_proj",
    "kv_b_proj", "indexer.wq_b", "indexer.wk", "indexer.weights_proj", *VOCABULARY,
))  # fmt: skip
_SIZED_BY_CLASS = frozenset((
    "qkvr", "wo_ud", "out_proj", "in_proj", "in_proj_qkvz", "up_proj", "fc1_latent_proj",
    "fc2_latent_proj",
))  # fmt: skip
_OWN_SIZES = ("NemotronH", "Laguna", "Gemma4ForConditional", "Qwen3_5", "Inkling", "InternS2",
              "Gemma3n", "Llama4ForConditional")  # fmt: skip
# Names of parts of a module in transformers' checkpoints, where SGLang's module has another.
_EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def check_configuration(adapter: Adapter, tree: BaseTree) -> None:
    """lora_config.py; lora_manager.py, validate_new_adapter; lora.py, LoRAAdapter."""
    raw = adapter.config.raw or {}
    folder = Path(adapter.path).absolute()
    if Path(adapter.config.file or "").name != "adapter_config.json":
        raise Refused(f"[Errno 2] No such file or directory: '{folder / 'adapter_config.json'}'")
    for field in ("target_modules", "r", "lora_alpha"):
        if field not in raw:
            raise Refused(f"'{field}'")
    if _adds_tokens(folder, tree):
        raise Refused(
            f"Failed to load {_ADAPTER} because LoRA serving currently doesn't support adapters "
            "that add tokens to the vocabulary"
        )
    if raw.get("use_dora"):
        raise Refused(
            f"Failed to load {_ADAPTER} because LoRA serving currently doesn't support DoRA "
            "adapters"
        )
    if str(raw.get("peft_type", "")).lower() != "lora":
        raise Refused("AssertionError" if "peft_type" in raw else "'peft_type'")
    rank = raw["r"]
    if isinstance(rank, int | float) and rank == 0:
        raise Refused("division by zero")
    targets = raw["target_modules"]
    if targets is None:
        raise Refused("'NoneType' object is not iterable")
    if isinstance(targets, str) and targets not in ("all", "all-linear"):
        raise Refused("Only 'all' or 'all-linear' can be used as the string for target module")


def _adds_tokens(folder: Path, tree: BaseTree) -> bool:
    """Whether added_tokens.json lies there with tokens that the base does not have."""
    file = folder / "added_tokens.json"
    if not file.is_file():  # a pipe would be waited for
        return False
    try:
        with file.open("rb") as stream:
            tokens = json.loads(stream.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return False
    numbers = tokens.values() if isinstance(tokens, dict) else ()
    return any(isinstance(n, int) and n >= tree.spec.vocab_size for n in numbers)


def targets_of(adapter: Adapter, tree: BaseTree, options: ServeOptions) -> frozenset[str]:
    """lora_manager.py, init_lora_shapes: the server's target modules, by SGLang's names."""
    own = adapter.config.target_modules
    asked = options.lora_target_modules
    if asked is None:
        found = _present(tree) if isinstance(own, str) else normal(own or ())
        _require_sizes(found, tree)
    else:
        found = _present(tree) | set(VOCABULARY) if asked == ("all",) else normal(asked)
        _require_sizes(found, tree)
        wanted = frozenset() if isinstance(own, str) else normal(own or ())
        if not wanted <= found:
            raise Refused(
                f"LoRA adapter '{_ADAPTER}' contains target modules {sorted(wanted - found)} "
                f"that are not included in the specified --lora-target-modules {sorted(found)}. "
                "Please update --lora-target-modules to include all required modules: "
                f"{sorted(found | wanted)}, or use 'all' to enable all supported modules."
            )
    rank = adapter.config.rank
    if options.max_lora_rank is not None and rank is not None and rank > options.max_lora_rank:
        raise Refused(
            f"LoRA adapter {_ADAPTER} with rank {rank} is incompatible with the current LoRA "
            "memory pool configuration. Please ensure that the LoRA adapter's rank is within the "
            "configured `--max-lora-rank` and that the target modules are included in "
            "`--lora-target-modules`."
        )
    return frozenset(found)


def normal(names: Iterable[str]) -> frozenset[str]:
    leaves = (name.rpartition(".")[2] for name in names)
    return frozenset(NORMAL.get(leaf, leaf) for leaf in leaves)


def _sized(tree: BaseTree) -> frozenset[str]:
    own = tree.spec.architecture.startswith(_OWN_SIZES)
    return _SIZED | _SIZED_BY_CLASS if own else _SIZED


def _present(tree: BaseTree) -> frozenset[str]:
    """utils.py, auto_detect_lora_target_modules."""
    leaves = {leaf_of(module) for module in tree.modules.values()}
    return normal(leaves) & _sized(tree)


def _require_sizes(targets: Iterable[str], tree: BaseTree) -> None:
    unknown = sorted(set(targets) - _sized(tree))
    if unknown:
        raise Refused(f"get_hidden_dim not implemented for {unknown[0]}")


def leaf_of(module: BaseModule) -> str:
    leaf = module.path.rpartition(".")[2]
    return _EXPERTS.get(leaf, leaf) if module.num_experts else leaf

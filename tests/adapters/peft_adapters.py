"""Adapters made by the real `peft` on tiny models: the fixtures of every test of adapters.

`CASES` names them; `make_adapter(name, folder)` trains nothing but draws every adapter weight at
random, so that each adapter changes its model. Nothing here knows how ullage reads them.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Case:
    """How one adapter is made: on which base, by which method, with which settings.

    `rename` changes the keys after `get_peft_model_state_dict`; `wrap` returns the state dict of
    the model as a trainer's wrapper gives it, instead of what peft would save.
    """

    base: str = "llama"
    method: str = "LoraConfig"
    settings: dict[str, Any] = field(default_factory=dict)
    adapter_name: str = "default"
    rename: Callable[[str], str] | None = None
    wrap: Callable[[Any], Tensors] | None = None
    pickle: bool = False


def _lora(**settings: Any) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR, **settings}


def _ddp(model: Any) -> Tensors:
    with _OneProcess():
        return torch.nn.parallel.DistributedDataParallel(model).state_dict()


def _fsdp(model: Any) -> Tensors:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with _OneProcess():
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu")
        )
        return {
            name: value.detach().clone()
            for name, value in torch.nn.Module.named_parameters(wrapped)
            if "lora_" in name
        }


def _fsdp_inside(model: Any) -> Tensors:
    """Layer by layer, as FSDP's automatic policies wrap, with the names that it gives."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    layers = model.base_model.model.model.layers
    with _OneProcess():
        for index in range(len(layers)):
            layers[index] = FullyShardedDataParallel(
                layers[index], use_orig_params=True, device_id=torch.device("cpu")
            )
        return {
            name: value.detach().clone()
            for name, value in torch.nn.Module.named_parameters(model)
            if "lora_" in name
        }


def _compiled(model: Any) -> Tensors:
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(torch.compile(model))


def _compiled_layers(model: Any) -> Tensors:
    from peft import get_peft_model_state_dict

    layers = model.base_model.model.model.layers
    for index in range(len(layers)):
        layers[index] = torch.compile(layers[index])
    return get_peft_model_state_dict(model)


def _checkpointed(model: Any) -> Tensors:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = model.base_model.model.model.layers
    for index in range(len(layers)):
        layers[index] = checkpoint_wrapper(layers[index])
    return {name: value for name, value in model.named_parameters() if "lora_" in name}


class _OneProcess:
    """A process group of this one process."""

    def __enter__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{self.folder.name}/store", rank=0, world_size=1
        )

    def __exit__(self, *reason: object) -> None:
        torch.distributed.destroy_process_group()
        self.folder.cleanup()


CASES: dict[str, Case] = {
    "plain": Case(settings=_lora()),
    "plain bin": Case(settings=_lora(), pickle=True),
    "attention only": Case(settings=_lora(target_modules=["q_proj", "v_proj"])),
    "rank 32": Case(settings=_lora(r=32, lora_alpha=64)),
    "rank 64": Case(settings=_lora(r=64, lora_alpha=64)),
    "subtracted": Case(settings=_lora(lora_alpha=-8)),
    "custom name": Case(settings=_lora(), adapter_name="my-adapter_2"),
    "rslora": Case(settings=_lora(r=16, lora_alpha=16, use_rslora=True)),
    "dora": Case(settings=_lora(use_dora=True)),
    "lora bias": Case(settings=_lora(lora_bias=True)),
    "bias all": Case(base="biased", settings=_lora(bias="all")),
    "bias lora_only": Case(base="biased", settings=_lora(bias="lora_only")),
    "patterns": Case(
        settings=_lora(
            rank_pattern={"q_proj": 8, r"layers\.1\.mlp\..*": 2, "o_proj": 16},
            alpha_pattern={"q_proj": 32, r"model\.layers\.0\.self_attn\.(k|v)_proj": 5},
        )
    ),
    "rslora patterns": Case(
        settings=_lora(use_rslora=True, rank_pattern={"q_proj": 8}, alpha_pattern={"down_proj": 1})
    ),
    "layers": Case(settings=_lora(layers_to_transform=[1])),
    "all-linear": Case(settings=_lora(target_modules="all-linear")),
    "regex": Case(settings=_lora(target_modules=r".*\.layers\.0\..*(q|v)_proj")),
    "modules_to_save": Case(settings=_lora(modules_to_save=["lm_head"])),
    "modules_to_save norm": Case(settings=_lora(modules_to_save=["input_layernorm"])),
    "embedding": Case(settings=_lora(target_modules=["q_proj", "embed_tokens"])),
    "lm_head": Case(settings=_lora(target_modules=["q_proj", "lm_head"])),
    "embeddings": Case(settings=_lora(target_modules=["q_proj", "embed_tokens", "lm_head"])),
    "tied lm_head": Case(base="tied", settings=_lora(target_modules=["q_proj", "lm_head"])),
    "tied embedding": Case(base="tied", settings=_lora(target_modules=["q_proj", "embed_tokens"])),
    "trainable tokens": Case(settings=_lora(trainable_token_indices={"embed_tokens": [1, 5, 7]})),
    "pissa": Case(settings=_lora(init_lora_weights="pissa")),
    "olora": Case(settings=_lora(init_lora_weights="olora")),
    "gpt2": Case(
        base="gpt2", settings=_lora(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    ),
    "fused": Case(base="phi3", settings=_lora(target_modules=["qkv_proj", "gate_up_proj"])),
    "moe attention": Case(base="moe", settings=_lora(target_modules=["q_proj", "v_proj"])),
    "moe experts": Case(
        base="moe", settings=_lora(target_modules=["q_proj"], target_parameters=EXPERTS)
    ),
    "moe gate_up": Case(
        base="moe", settings=_lora(target_modules=[], target_parameters=EXPERTS[:1])
    ),
    "moe down": Case(base="moe", settings=_lora(target_modules=[], target_parameters=EXPERTS[1:])),
    "moe router": Case(
        base="moe", settings=_lora(target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])
    ),
    "vision-language": Case(base="vlm", settings=_lora(target_modules=["q_proj", "v_proj"])),
    "classifier": Case(base="classifier", settings=_lora(task_type="SEQ_CLS")),
    "compiled": Case(settings=_lora(), wrap=_compiled),
    "compiled layers": Case(settings=_lora(), wrap=_compiled_layers),
    "ddp": Case(settings=_lora(), wrap=_ddp),
    "fsdp": Case(settings=_lora(), wrap=_fsdp),
    "fsdp nameless": Case(
        settings=_lora(), wrap=_fsdp, rename=lambda key: key.replace(".default.", ".")
    ),
    "fsdp layers": Case(
        settings=_lora(), wrap=_fsdp_inside, rename=lambda key: key.replace(".default.", ".")
    ),
    "checkpointed": Case(
        settings=_lora(), wrap=_checkpointed, rename=lambda key: key.replace(".default.", ".")
    ),
    "name kept": Case(settings=_lora(), rename=lambda key: _with_name(key)),
    "no prefix": Case(settings=_lora(), rename=lambda key: key.removeprefix("base_model.model.")),
    "one model short": Case(
        settings=_lora(),
        rename=lambda key: key.replace("base_model.model.model.", "base_model.model."),
    ),
    "adalora": Case(
        method="AdaLoraConfig",
        settings={"init_r": 6, "target_r": 4, "total_step": 10, "target_modules": ["q_proj"]},
    ),
    "vera": Case(method="VeraConfig", settings={"r": 8, "target_modules": ["q_proj", "o_proj"]}),
    "ia3": Case(
        method="IA3Config",
        settings={
            "target_modules": ["k_proj", "v_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
        },
    ),
    "loha": Case(method="LoHaConfig", settings={"r": 4, "target_modules": ["q_proj"]}),
    "lokr": Case(method="LoKrConfig", settings={"r": 4, "target_modules": ["q_proj"]}),
    "oft": Case(
        method="OFTConfig", settings={"oft_block_size": 8, "r": 0, "target_modules": ["q_proj"]}
    ),
    "boft": Case(
        method="BOFTConfig", settings={"boft_block_size": 8, "target_modules": ["q_proj"]}
    ),
    "hra": Case(method="HRAConfig", settings={"r": 4, "target_modules": ["q_proj"]}),
    "fourierft": Case(
        method="FourierFTConfig", settings={"n_frequency": 16, "target_modules": ["q_proj"]}
    ),
    "ln tuning": Case(
        method="LNTuningConfig", settings={"target_modules": ["input_layernorm", "norm"]}
    ),
    "prompt tuning": Case(method="PromptTuningConfig", settings={"num_virtual_tokens": 4}),
    "prefix tuning": Case(method="PrefixTuningConfig", settings={"num_virtual_tokens": 4}),
    "p tuning": Case(
        method="PromptEncoderConfig",
        settings={"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    ),
    "trainable tokens only": Case(
        method="TrainableTokensConfig",
        settings={"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    ),
}


def _with_name(key: str) -> str:
    for word in ("lora_A", "lora_B"):
        key = key.replace(f".{word}.weight", f".{word}.default.weight")
    return key


_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_base(kind: str) -> Any:
    """A tiny model with fixed random weights: llama, tied, biased, gpt2, phi3, moe, vlm, …"""
    import transformers as hf

    torch.manual_seed(0)
    if kind == "gpt2":
        config = hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=128)
        return hf.GPT2LMHeadModel(config)
    if kind == "phi3":
        return hf.Phi3ForCausalLM(hf.Phi3Config(**_SMALL))
    if kind == "moe":
        return hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(
                **_SMALL,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                head_dim=16,
            )
        )
    if kind == "vlm":
        vision = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        config = hf.Gemma3Config(
            text_config={**_SMALL, "head_dim": 16, "sliding_window": 32},
            vision_config=vision,
            mm_tokens_per_image=4,
        )
        return hf.Gemma3ForConditionalGeneration(config)
    extra = {"tied": {"tie_word_embeddings": True}, "biased": {"attention_bias": True}}
    config = hf.LlamaConfig(**{**_SMALL, **extra.get(kind, {})})
    if kind == "classifier":
        return hf.LlamaForSequenceClassification(config)
    return hf.LlamaForCausalLM(config)


def save_base(kind: str, folder: Path) -> Path:
    """The base of `kind` as `save_pretrained` writes it."""
    make_base(kind).save_pretrained(folder)
    return folder


def make_model(name: str) -> Any:
    """The PeftModel of the case, every trainable weight moved off its start by random draws."""
    import peft

    case = CASES[name]
    base = make_base(case.base)
    task = case.settings.get("task_type", "CAUSAL_LM")
    settings = {**case.settings, "task_type": task}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(peft, case.method)(**settings)
        model = peft.get_peft_model(base, config, adapter_name=case.adapter_name)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_adapter(name: str, folder: Path, base: Path | str | None = None) -> Path:
    """The case's adapter in its own directory below `folder`; that directory.

    `base` is what adapter_config.json gives as the base model (nothing by default).
    """
    case = CASES[name]
    target = folder / name.replace(" ", "-")
    model = make_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(target, safe_serialization=not case.pickle)
        if case.adapter_name != "default":
            target = target / case.adapter_name
        if case.wrap is not None or case.rename is not None:
            rewrite(target, case.wrap(model) if case.wrap else None, case.rename)
    if base is not None:
        change_config(target, base_model_name_or_path=str(base))
    return target


def rewrite(folder: Path, tensors: Tensors | None, rename: Callable[[str], str] | None) -> None:
    """Puts other tensors, or the same under other keys, into an adapter's safetensors file."""
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    tensors = load_file(file) if tensors is None else tensors
    kept = {
        (rename(key) if rename else key): value.detach().clone().contiguous()
        for key, value in tensors.items()
        if "lora_" in key or rename is not None
    }
    save_file(kept, file, metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    """Changes fields of an adapter's adapter_config.json; the value ... takes one out."""
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    kept = {key: value for key, value in config.items() if value is not ...}
    file.write_text(json.dumps(kept, indent=2))

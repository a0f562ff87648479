"""For every rule: what fires it, and on which pool it must be clear. Data, no tests.

A firing case is a mutation (`change`) of named configurations, or a deployment, or files. Names are
own models or shared configurations; a case on shared ones is skipped where those are absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from audit_pool import (
    Config,
    Tensors,
    changed,
    side_file_of,
    side_files,
    text_part,
    write_directory,
    write_safetensors,
    write_whole,
)
from deep_models import (
    copy_layer,
    copy_row,
    filled,
    put_at,
    scaled,
    tall,
    untrained,
    with_pickle,
    with_scales,
)
from launch_cases import LAUNCH_RULES, File, command

from ullage.costs.deployment import Deployment, Parallel

DEFAULT = Deployment()
LLAMA = ("llama", "meta-llama--Meta-Llama-3.1-8B")
Pool = Literal["plain", "dressed", "whole", "deep", "tall"]


@dataclass(frozen=True)
class Fires:
    """One way to fire a rule: on each of `names`, after `change`, deployed as `deployment`.

    `build` writes the model's directory itself (given a place and the changed configuration);
    without it the directory holds config.json and the shared quantisation side file, if any.
    `launch` is the deployment file, whose settings then make the deployment.
    """

    names: tuple[str, ...]
    change: Callable[[Config], None] | None = None
    deployment: Deployment = DEFAULT
    gpu: str | None = None
    build: Callable[[Path, Config], Path] | None = None
    severity: str | None = None
    says: str = ""
    launch: File | None = None

    def write(self, place: Path, name: str) -> Path:
        config = changed(name, self.change)
        if self.build is not None:
            return self.build(place, config)
        return write_directory(place, config, side=side_file_of(name))


@dataclass(frozen=True)
class Case:
    """The firing cases of a rule, and the pool and deployment on which it is clear."""

    fires: tuple[Fires, ...]
    pool: Pool = "plain"
    deployment: Deployment = DEFAULT
    gpu: str | None = None
    launch: File | None = None
    leave_out: tuple[str, ...] = field(default=())


def put(**values: object) -> Callable[[Config], None]:
    """Set keys in the part that describes the language model; None removes one."""

    def change(config: Config) -> None:
        text = text_part(config)
        for key, value in values.items():
            if value is None:
                text.pop(key, None)
            else:
                text[key] = value

    return change


def top(**values: object) -> Callable[[Config], None]:
    return lambda config: config.update(values)


def run(tensor: int = 1, **values: object) -> Deployment:
    """A deployment: parallel sizes by name, the rest as Deployment's fields."""
    sizes = {k: values.pop(k) for k in ("pipeline", "data", "expert") if k in values}
    return Deployment(parallel=Parallel(tensor=tensor, **sizes), **values)


def with_files(**files: object) -> Callable[[Path, Config], Path]:
    """A directory whose side files are the agreeing ones, `files` replaced (dots as two _)."""

    def build(place: Path, config: Config) -> Path:
        made = side_files(config)
        for key, content in files.items():
            made[key.replace("__", ".")] = content
        return write_directory(place, config, made)

    return build


def whole(
    alter: Callable[[Tensors], None] | None = None, dtype: str = "BF16", **extra: str
) -> Callable[[Path, Config], Path]:
    """A directory with tensors; `alter` changes what is stored, `extra` adds empty files."""

    def build(place: Path, config: Config) -> Path:
        write_whole(place, config, alter=alter, dtype=dtype)
        for key, text in extra.items():
            (place / key.replace("__", ".")).write_text(text)
        return place

    return build


def without(ending: str) -> Callable[[Tensors], None]:
    def alter(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(ending)]:
            del tensors[name]

    return alter


def sharded(*, listed: dict[str, str] | None = None, total: int | None = None, keep: bool = True):
    """One shard with an index; `listed` adds promises to it, `keep` False leaves the shard out."""

    def build(place: Path, config: Config) -> Path:
        write_whole(place, config)
        shard = place / "model-00001-of-00001.safetensors"
        (place / "model.safetensors").rename(shard)
        from audit_pool import tensors_of

        tensors = tensors_of(place)
        size = write_safetensors(shard, tensors)
        index = {
            "metadata": {"total_size": size if total is None else total},
            "weight_map": {**dict.fromkeys(tensors, shard.name), **(listed or {})},
        }
        if not keep:
            shard.unlink()
        import json

        (place / "model.safetensors.index.json").write_text(json.dumps(index))
        return place

    return build


def without_layer(tensors: Tensors, layer: int) -> None:
    for name in [name for name in tensors if f"layers.{layer}." in name]:
        del tensors[name]


def two_checkpoints(place: Path, config: Config) -> Path:
    write_whole(place, config)
    write_safetensors(place / "consolidated.safetensors", {"output.weight": ("BF16", (8, 8))})
    return place


FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
              "weight_block_size": [128, 128]}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
         "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
             "num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}}}}  # fmt: skip


def with_side(**quantization: object) -> Callable[[Path, Config], Path]:
    def build(place: Path, config: Config) -> Path:
        return write_directory(place, config, side={"quantization": quantization})

    return build


def narrow(name: str, dtype: str = "F8_E4M3") -> Callable[[Tensors], None]:
    """Store one tensor in another format."""

    def alter(tensors: Tensors) -> None:
        tensors[name] = (dtype, tensors[name][1])

    return alter


def store(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: ("BF16", shape)})


INPUT_NORM = ".layers.1.input_layernorm.weight"
UP = "model.layers.1.mlp.up_proj.weight"

CASES: dict[str, Case] = {
    rule_id: Case(
        tuple(Fires(**{"names": LLAMA, **fires}) for fires in fires_of),
        pool=pool,
        launch=clear,
    )
    for rule_id, (fires_of, pool, clear) in LAUNCH_RULES.items()
} | {
    "A001": Case((Fires(LLAMA, put(head_dim=96), says="factor of"),)),
    "A002": Case(
        (
            Fires(("qwen3-next", "Qwen--Qwen3.5-27B"), says="keep something"),
            Fires(("nvidia--Nemotron-H-56B-Base-8K",), says="10 of 118"),
            Fires(("openai--gpt-oss-120b",), says="18 of 36"),
            Fires(("mistral",), says="None of the 2 layers"),
            Fires(("deepseek-ai--DeepSeek-V4-Flash",), says="None of"),
        )
    ),
    "A003": Case(
        (
            Fires(LLAMA, put(head_dim=20), says="FLEX_ATTENTION"),
            Fires(LLAMA, put(head_dim=72), run(platform="cpu"), severity="error"),
            Fires(
                ("deepseek-ai--DeepSeek-V3.2",), None, run(platform="cpu"), severity="error",
                says="sparse",
            ),
            Fires(
                ("deepseek-v3", "deepseek-ai--DeepSeek-V3"), put(kv_lora_rank=256),
                run(platform="cpu"), severity="error", says="320",
            ),
        )
    ),
    "A004": Case(
        (
            Fires(("qwen2", "Qwen--Qwen3-8B"), put(sliding_window=4096), severity="info"),
            Fires(("qwen2", "XiaomiMiMo--MiMo-7B-Base"),
                  lambda c: (put(use_sliding_window=True)(c), c.update(sliding_window=None)),
                  severity="warning"),
        ),
        leave_out=("XiaomiMiMo--MiMo-7B-Base",),
    ),
    "A005": Case(
        (
            Fires(("mistral", "openai--gpt-oss-120b"), put(sliding_window=1 << 20)),
            Fires(("openai--gpt-oss-120b",), None, run(max_model_len=100)),
        )
    ),
    "A021": Case(
        (
            Fires(
                ("llama-long", "meta-llama--Meta-Llama-3.1-8B"),
                put(rope_theta=10000.0, rope_scaling=None), says="comes round",
            ),
        ),
        leave_out=("stepfun-ai--Step-3.7-Flash-FP8",),
    ),
    "A022": Case((Fires(LLAMA, put(rope_theta=1e15, rope_scaling=None)),)),
    "A023": Case(
        (
            Fires(LLAMA, put(rope_parameters={"rope_theta": 777.0, "rope_type": "default"},
                             rope_scaling=None)),
            Fires(("llama-yarn", "deepseek-ai--DeepSeek-V3"),
                  put(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 4.0,
                                    "original_max_position_embeddings": 4096}),
                  severity="error"),
            Fires(("llama-yarn", "openai--gpt-oss-120b"),
                  put(rope_parameters={"rope_type": "yarn", "factor": 2.0}), says="both present"),
        )
    ),
    "A024": Case(
        (
            Fires(("llama-yarn", "deepseek-ai--DeepSeek-V3"),
                  lambda c: c["rope_scaling"].update(factor=2), says="fewer"),
            Fires(("llama-yarn", "openai--gpt-oss-120b"),
                  put(max_position_embeddings=4096), says="does not multiply"),
            Fires(("llama-yarn", "moonshotai--Kimi-K2-Instruct"),
                  lambda c: c["rope_scaling"].pop("original_max_position_embeddings"),
                  says="not given"),
        )
    ),
    "A025": Case(
        (Fires(LLAMA, put(rope_scaling={"rope_type": "llama4", "factor": 8.0})),)
    ),
    "A026": Case(
        (
            Fires(("Qwen--Qwen3.5-27B",),
                  lambda c: c["text_config"]["rope_parameters"].update(mrope_section=[11, 11, 8])),
            Fires(("Qwen--Qwen3-VL-32B-Instruct",),
                  lambda c: c["text_config"]["rope_scaling"].update(mrope_section=[24, 20, 16])),
            Fires(LLAMA, put(head_dim=63)),
        )
    ),
    "A027": Case(
        (
            Fires(LLAMA, put(max_position_embeddings=8_388_608)),
            Fires(LLAMA, None, run(max_model_len=5_000_000)),
        ),
        leave_out=("meta-llama--Llama-4-Scout-17B-16E-Instruct",),
    ),
    "A028": Case(
        (
            Fires(LLAMA, None, run(max_model_len=131_073)),
            Fires(("XiaomiMiMo--MiMo-7B-Base",), put(max_position_embeddings=16), run(
                max_model_len=17)),
        ),
        deployment=run(max_model_len=4096),
    ),
    "A041": Case(
        (
            Fires(LLAMA, put(intermediate_size=14_332), run(4), says="3583"),
            Fires(("Qwen--Qwen3-30B-A3B",), put(moe_intermediate_size=770)),
        ),
        deployment=run(2),
    ),
    "A042": Case(
        (
            Fires(("deepseek-v3", "deepseek-ai--DeepSeek-V3"), put(n_group=3), says="equal groups"),
            Fires(("deepseek-ai--DeepSeek-V3",), put(n_group=256), says="4 of 256 groups"),
        )
    ),
    "A051": Case(
        (
            Fires(LLAMA, put(rms_norm_eps=0.0), says="NaN"),
            Fires(LLAMA, put(rms_norm_eps=0.1)),
        )
    ),
    "A052": Case(
        (
            Fires(LLAMA, None, run(dtype="float16")),
            Fires(("gemma3",), None, run(dtype="half"), severity="error"),
        )
    ),
    "A061": Case((Fires(LLAMA, None, run(3)),), deployment=run(2)),
    "A062": Case(
        (
            Fires(LLAMA, put(num_key_value_heads=8, num_attention_heads=48, head_dim=64), run(12)),
            Fires(LLAMA, None, run(3)),
        ),
        deployment=run(2),
    ),
    "A063": Case(
        (
            Fires(("Qwen--Qwen3-235B-A22B",), None, run(8), says="2 times"),
            Fires(("llama",), None, run(4)),
            Fires(("deepseek-v3", "deepseek-ai--DeepSeek-V3"), None, run(8), says="latent"),
        ),
        deployment=run(2),
    ),
    "A064": Case(
        (
            Fires(LLAMA, put(intermediate_size=11_009), run(4)),
            Fires(("mixtral", "Qwen--Qwen3-30B-A3B"), None, run(5), says="moe_intermediate_size"),
        ),
        deployment=run(2),
    ),
    "A065": Case(
        (
            Fires(("Qwen--Qwen3-30B-A3B",), None, run(2, data=3, expert=True)),
            Fires(("mixtral",), None, run(1, data=3, expert=True)),
            Fires(LLAMA, None, run(2, expert=True), severity="error"),
        )
    ),
    "A066": Case((Fires(LLAMA, None, run(7)),), deployment=run(4)),
    "A067": Case((Fires(LLAMA, put(vocab_size=50_257), says="47 empty rows"),)),
    "A068": Case(
        (
            Fires(("deepseek-ai--DeepSeek-V3",), None, run(pipeline=4), says="15, 15, 16, 15"),
            Fires(LLAMA, put(num_hidden_layers=3), run(pipeline=4), severity="error"),
        ),
        deployment=run(pipeline=2),
    ),
    "A069": Case(
        (
            Fires(("qwen3-next", "Qwen--Qwen3.5-27B"), None, run(32), says="linear-attention"),
            Fires(("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",), None, run(16), says="groups"),
        ),
        deployment=run(2),
    ),
    "A070": Case(
        (
            Fires(LLAMA, None, run(4), gpu="H100-SXM:2", severity="error"),
            Fires(LLAMA, None, run(2), gpu="H100-SXM:8", severity="warning"),
        ),
        deployment=run(2),
        gpu="H100-SXM:2",
    ),
    "A071": Case(
        (
            Fires(("phi3",), None, run(4), severity="info", says="copies KV heads"),
            Fires(("phi3",), put(num_attention_heads=8, num_key_value_heads=4, hidden_size=512,
                                 intermediate_size=514), run(4), says="gate and up columns"),
            Fires(("meta-llama--Meta-Llama-3.1-8B",),
                  lambda c: (put(rope_scaling=None, num_key_value_heads=10, num_attention_heads=40,
                                 hidden_size=5120)(c),
                             c.update(model_type="phi3", architectures=["Phi3ForCausalLM"])),
                  run(4), says="10 KV heads do not divide over 4"),
        ),
        deployment=run(2),
    ),
    "A107": Case(
        (
            Fires(LLAMA, None, build=with_files(tokenizer__json={
                "model": {"type": "BPE", "vocab": {"a": 1, "z": 200_000, "b": 2}}}),
                says="base vocabulary with id 200,000"),
            Fires(LLAMA, None, build=with_files(tokenizer__json={
                "added_tokens": [{"id": 300_000, "content": "<new>"}],
                "model": {"type": "WordPiece", "vocab": {"a": 0}}}), says="an added token"),
            Fires(("llama",), None, build=with_files(tokenizer__json={
                "model": {"type": "Unigram", "vocab": [[f"{n}]", -1.5e-1] for n in range(1025)]}}),
                says="id 1,024"),
        ),
        pool="dressed",
    ),
    "A108": Case(
        (
            Fires(LLAMA, None, build=with_files(generation_config__json={"max_new_tokens": 512}),
                  says="sets max_new_tokens 512"),
            Fires(LLAMA, None, build=with_files(generation_config__json={"max_length": 4000}),
                  severity="info", says="max_length 4,000"),
            Fires(LLAMA, None, launch=command(
                "--override-generation-config '{\"max_new_tokens\": 300}'"), says="300 tokens"),
        ),
        pool="dressed",
    ),
    "A129": Case(
        (
            Fires(("Qwen--Qwen3.5-27B", "meta-llama--Llama-4-Scout-17B-16E-Instruct"),
                  top(dtype="float16"), says="loads every part in the first"),
            Fires(("nvidia--Qwen3.6-27B-NVFP4",),
                  lambda c: c["vision_config"].update(dtype="float32"), severity="info",
                  says="vision_config.dtype float32"),
        )
    ),
    "A130": Case(
        (
            Fires(LLAMA, None, build=with_files(README__md="# A model\nlicense: none here\n"),
                  says="Neither"),
            Fires(LLAMA, None, build=with_files(
                README__md="---\nlicense: other\nextra_gated_prompt: Agree\n---\n"),
                says="gated (extra_gated_prompt"),
        ),
        pool="dressed",
    ),
    "A144": Case(
        (
            Fires(("nvidia--Nemotron-H-56B-Base-8K",), gpu="H200", says="13 requests fit"),
            Fires(("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",), None,
                  run(kv_cache_memory_bytes=665_000_000, max_model_len=8192),
                  says="33.3%"),
            Fires(("Qwen--Qwen3.5-27B",), gpu="H200", severity="info", says="4 blocks of 1,515"),
            Fires(("Qwen--Qwen3.5-27B",), None, run(max_num_seqs=900), gpu="H200"),
        )
    ),
    "A145": Case(
        (
            Fires(("Qwen--Qwen3.5-27B", "google--gemma-4-26B-A4B"), None,
                  launch=command("--language-model-only"), says="GiB of weights"),
            Fires(("Qwen--Qwen3-VL-8B-Instruct",), None, launch=command("--mm-encoder-only"),
                  says="leaves the language model unused"),
        )
    ),
    "A146": Case(
        (
            Fires(("deepseek-ai--DeepSeek-V3", "Qwen--Qwen3.5-27B"), None, launch=command(
                "--speculative-config '{\"method\": \"mtp\", \"num_speculative_tokens\": 1}'"),
                says="turns on 1 multi-token"),
            Fires(LLAMA, None, launch=command("--spec-method mtp"), severity="warning",
                  says="names no such layer"),
            Fires(LLAMA, None, launch=command(
                "--speculative-config '{\"model\": \"small/one\"}'"), says="'small/one'"),
        )
    ),
    "A081": Case(
        (
            Fires(("Qwen--Qwen3-235B-A22B-FP8",), None, run(8), severity="warning", says="of 64"),
            Fires(("Qwen--Qwen3-32B-FP8",), None, run(16), says="1600"),
            Fires(LLAMA, put(quantization_config=FP8_BLOCKS), run(64), severity="error"),
            Fires(("qwen3-moe",), put(quantization_config=FP8_BLOCKS), run(2),
                  severity="warning", says="64"),
            # a gate per head is smaller than a block: only the checkpoint says if it is quantised
            Fires(("stepfun-ai--Step-3.7-Flash-FP8",), None, run(2), severity="warning",
                  says="64 rows"),
            # the shared expert's 1280 over 8 ranks is a certain stop, and is said before it
            Fires(("stepfun-ai--Step-3.7-Flash-FP8",), None, run(8), severity="error",
                  says="share_expert.down_proj"),
        ),
        deployment=run(2),
    ),
    "A082": Case(
        (
            Fires(LLAMA, put(quantization_config=AWQ), run(64), says="group of 128"),
            Fires(("nvidia--Gemma-4-26B-A4B-NVFP4",), None, run(8),
                  says="without a word"),
        ),
        deployment=run(2),
    ),
    "A083": Case(
        (Fires(LLAMA, put(quantization_config=GPTQ, intermediate_size=11_008), run(8)),),
        deployment=run(2),
    ),
    "A084": Case(
        (
            Fires(LLAMA, put(quantization_config={"quant_method": "bitsandbytes",
                                                  "load_in_4bit": True}), says="no loader"),
            Fires(LLAMA, put(quantization_config={"quant_method": "fbgemm_fp8"}),
                  says="deprecated"),
            Fires(LLAMA, put(quantization_config={"quant_method": "hqq"}), says="'hqq'"),
        )
    ),
    "A085": Case(
        (
            Fires(("llama", "nvidia--GLM-5.2-NVFP4"), put(quantization_config=NVFP4),
                  build=with_side(quant_algo="FP8", kv_cache_quant_algo="FP8"), says="quant_algo"),
            Fires(("llama", "nvidia--GLM-5.2-NVFP4"), put(quantization_config=NVFP4),
                  build=with_side(quant_algo="NVFP4", kv_cache_quant_algo="NVFP4", group_size=16),
                  says="KV cache"),
        )
    ),
    "A086": Case(
        (
            Fires(("nvidia--Llama-3.1-70B-Instruct-FP8", "nvidia--Qwen3.6-27B-NVFP4"), None,
                  run(kv_cache_dtype="bfloat16")),
            Fires(("llama",), put(quantization_config=NVFP4), run(kv_cache_dtype="bfloat16")),
        ),
        deployment=run(kv_cache_dtype="fp8"),
    ),
    "A087": Case(
        (Fires(("llama", "qwen3"), None, run(kv_cache_dtype="fp8"), build=whole()),),
        pool="whole",
    ),
    "A088": Case(
        (
            Fires(LLAMA, None, run(kv_cache_dtype="fp8_e4m3fn")),
            Fires(LLAMA, None, run(platform="cpu", kv_cache_dtype="nvfp4"), severity="warning"),
        ),
        deployment=run(kv_cache_dtype="fp8"),
    ),
    "A089": Case(
        (
            Fires(("Qwen--Qwen3-32B-FP8",), gpu="A100-80", says="fp8"),
            Fires(("nvidia--DeepSeek-V3.1-NVFP4",), gpu="H100-SXM", says="fp4"),
            Fires(("llama",), put(quantization_config=FP8_BLOCKS), gpu="A100-80"),
        ),
        gpu="B200",
    ),
    "A090": Case(
        (Fires(("llama",), put(quantization_config=FP8_BLOCKS), build=whole()),), pool="whole"
    ),
    "A091": Case((Fires(("llama",), build=whole(narrow(UP))),), pool="whole"),
    "A101": Case(
        (
            Fires(LLAMA, top(eos_token_id=1_000_000)),
            Fires(("Qwen--Qwen3-VL-8B-Instruct",), top(image_token_id=151_936),
                  severity="warning"),
            Fires(("llama",), None, build=with_files(
                generation_config__json={"eos_token_id": [2, 1024]}), says="generation_config"),
        )
    ),
    "A102": Case(
        (
            Fires(LLAMA, None, build=with_files(generation_config__json={"eos_token_id": 7}),
                  says="config.json ends"),
            Fires(LLAMA, None, build=with_files(tokenizer_config__json={
                "eos_token": {"content": "<stop>"},
                "added_tokens_decoder": {"9": {"content": "<stop>"}}}), says="token 9"),
        ),
        pool="dressed",
    ),
    "A103": Case(
        (
            Fires(LLAMA, top(eos_token_id=None), build=with_files(
                generation_config__json={"temperature": 0.7}, tokenizer_config__json={})),
        ),
        pool="dressed",
    ),
    "A104": Case((Fires(LLAMA, top(pad_token_id=2, eos_token_id=[2, 3])),)),
    "A105": Case(
        (
            Fires(LLAMA, None, build=with_files(tokenizer_config__json={}), severity="info"),
            Fires(LLAMA, None, build=lambda place, config: with_files(
                tokenizer_config__json={})(place / "tiny-Instruct", config), severity="warning"),
        ),
        pool="dressed",
    ),
    "A106": Case(
        (
            Fires(LLAMA, None, build=with_files(tokenizer_config__json={
                "added_tokens_decoder": {"200000": {"content": "<new>"}}})),
        ),
        pool="dressed",
    ),
    "A121": Case(
        (
            Fires(("llama", "qwen3-moe"), build=sharded(
                listed={"model.extra.weight": "model-00002-of-00002.safetensors"}),
                says="model-00002"),
            Fires(("llama",), build=sharded(
                listed={"model.extra.weight": "model-00001-of-00001.safetensors"}),
                says="promises 1 tensor"),
        ),
        pool="whole",
    ),
    "A122": Case((Fires(("llama", "mixtral"), build=sharded(total=12345)),), pool="whole"),
    "A123": Case(
        (Fires(("llama",), build=two_checkpoints, says="another checkpoint"),),
        pool="whole",
    ),
    "A124": Case(
        (
            Fires(("llama",), build=whole(pytorch_model__bin=""), severity="info"),
            Fires(LLAMA, build=with_files(**{"pytorch_model-00001-of-00002__bin": ""}),
                  severity="warning"),
        ),
        pool="dressed",
    ),
    "A125": Case(
        (Fires(LLAMA, top(auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})),)
    ),
    "A126": Case(
        (
            Fires(("llama", "qwen3"), build=whole(without("lm_head.weight")), severity="error"),
            Fires(("llama-tied",), build=whole(
                lambda t: t.update({"lm_head.weight": ("BF16", (1024, 256))})),
                severity="info"),
        ),
        pool="whole",
    ),
    "A131": Case(
        (
            Fires(("llama", "qwen3"), build=whole(without("layers.1.mlp.up_proj.weight")),
                  says="up_proj"),
            Fires(("qwen3-moe",), build=whole(without("experts.7.up_proj.weight")), says="2 tens"),
        ),
        pool="whole",
    ),
    "A132": Case(
        (Fires(("llama",), build=whole(store("model.layers.1.mlp.up_proj.lora_A.weight", 8, 256)),
               says="lora_A"),),
        pool="whole",
    ),
    "A133": Case((Fires(("llama", "qwen3"), build=whole(store(UP, 500, 256)),
                        says="[500, 256]"),), pool="whole"),
    "A134": Case((Fires(("llama",), build=whole(narrow(UP))),), pool="whole"),
    "A135": Case(
        (Fires(("deepseek-v3",), put(num_nextn_predict_layers=1),
               build=whole(lambda t: without_layer(t, 2))),),
        pool="whole",
    ),
    "A141": Case(
        (
            Fires(("meta-llama--Meta-Llama-3.1-405B",), None, run(8), gpu="H100-SXM:8"),
            Fires(("llama",), put(intermediate_size=1 << 24, num_hidden_layers=8), gpu="H100-SXM"),
        ),
        gpu="H200",
    ),
    "A142": Case(
        (
            Fires(("meta-llama--Meta-Llama-3.1-8B",), gpu="RTX-4090", says="does not fit"),
            Fires(("llama",), None, run(kv_cache_memory_bytes=1 << 20)),
            Fires(("meta-llama--Meta-Llama-3.1-405B",), None, run(8), gpu="H100-SXM:8",
                  says="refuses"),
        ),
        deployment=run(max_model_len=2048),
        gpu="H200",
    ),
    "A143": Case(
        (
            Fires(("meta-llama--Meta-Llama-3.1-8B",), None, run(max_num_seqs=1024), gpu="L40S"),
            Fires(("llama",), None, run(kv_cache_memory_bytes=1 << 26, max_num_seqs=256)),
        ),
        deployment=run(max_num_seqs=4, max_model_len=512),
        gpu="H200",
    ),
    "A127": Case(
        (
            Fires(("llama",), build=whole(dtype="F32"), severity="info"),
            Fires(("qwen2",), build=whole(dtype="F16"), severity="warning"),
        ),
        pool="whole",
    ),
    "A128": Case(
        (
            Fires(LLAMA, build=with_pickle("pytorch_model.bin", "posix system"), says="system"),
            Fires(("llama",), build=with_pickle("optimizer.pt", "builtins eval"), says="eval"),
            Fires(("llama",), build=with_pickle("a.bin", "torch FloatStorage", "yolo.models Net"),
                  severity="warning", says="yolo"),
        ),
        pool="dressed",
    ),
    "A151": Case(
        (
            Fires(("llama",), build=filled(put_at(UP, (3, 5), 0x7FC1)), says="1 NaN"),
            Fires(("qwen2",), build=filled(put_at("norm.weight", 4, 0xFF80)), says="1 Inf"),
            Fires(("mixtral",), build=filled(put_at("embed_tokens.weight", slice(2), 0xFFFF)),
                  says="NaN, the first at element 0"),
        ),
        pool="deep",
    ),
    "A152": Case(
        (
            Fires(("llama", "qwen3"), build=filled(put_at(UP, slice(None), 0)), says="nothing but"),
            Fires(("llama",), build=filled(put_at(UP, slice(9, 12), 0x8000)), severity="info",
                  says="3 of"),
        ),
        pool="deep",
    ),
    "A153": Case(
        (
            Fires(("llama", "qwen3"), build=filled(copy_row(UP, 2)), says="2 of"),
            Fires(("llama",), build=filled(copy_row("embed_tokens.weight", 500)), says="500 of"),
        ),
        pool="deep",
    ),
    "A154": Case(
        (Fires(("llama",), build=filled(put_at(UP, (slice(None), 7), 0x4100)), says="Channel 7"),),
        pool="deep",
    ),
    "A155": Case(
        (
            Fires(("llama",), build=filled(put_at(UP, (0, 0), 0x4790)), says="73728"),
            Fires(("llama",), None, run(dtype="float16"), severity="error",
                  build=filled(put_at(UP, (0, 0), 0xC790))),
        ),
        pool="deep",
    ),
    "A156": Case(
        (Fires(("llama",), build=filled(put_at("norm.weight", 0, 0x4400)), says="512"),),
        pool="deep",
    ),
    "A157": Case(
        (
            Fires(("llama",), build=filled(put_at("norm.weight", slice(None), 0)),
                  severity="error", says="multiplies by zero"),
            Fires(("llama",), build=filled(put_at("norm.weight", slice(200), 0)), says="half"),
            Fires(("gemma3",), build=filled(put_at("layernorm.weight", slice(None), 0xBF80)),
                  severity="error"),
            Fires(("llama",), None, run(dtype="float16"),
                  build=filled(put_at("norm.weight", 0, 0x4780)), says="can reach"),
        ),
        pool="deep",
    ),
    "A158": Case((Fires(("llama", "qwen3"), build=filled(copy_layer), says="same bytes"),),
                 pool="deep"),
    "A159": Case(
        (
            Fires(("llama",), put(quantization_config=FP8_BLOCKS), build=with_scales(0x7F80),
                  severity="error", says="NaN or Inf"),
            Fires(("llama",), put(quantization_config=FP8_BLOCKS), build=with_scales(0),
                  says="1 scales"),
        ),
        pool="deep",
    ),
    "A160": Case(
        (
            # A scale folded in twice, a scale lost, and one flipped bit of an exponent.
            Fires(("llama", "qwen3"), build=tall(scaled(INPUT_NORM, 1000)), says="times above"),
            Fires(("llama",), build=tall(scaled(INPUT_NORM, 1e-3)), says="times below"),
            Fires(("llama",), build=tall(put_at(INPUT_NORM, 5, 0x7F00)), says="times above"),
            Fires(("gemma3",), build=tall(put_at(INPUT_NORM, slice(None), 0x44FA)),
                  says="times above"),
            # One layer's norm was not found and is one everywhere; of Gemma's, zero.
            Fires(("llama",), build=tall(put_at(INPUT_NORM, slice(None), 0x3F80)),
                  says="is 1 at each"),
            Fires(("gemma3",), build=tall(put_at(INPUT_NORM, slice(None), 0)),
                  says="is 1 at each"),
            Fires(("llama",), build=tall(untrained), severity="info", says="before training"),
        ),
        pool="tall",
    ),
}  # fmt: skip

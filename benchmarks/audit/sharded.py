"""A DeepSeek-V3 checkpoint of any depth without its numbers: real headers, an index, sparse shards.

Names and shapes are written out here and share no code with ullage. Files have their full length,
but hold holes where the weights would lie, so that a checkpoint of 700 GB takes a few megabytes:

    .venv/bin/python benchmarks/audit/sharded.py DIRECTORY LAYERS SHARDS
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
Tensor = tuple[str, str, tuple[int, ...]]


def tensors(layers: int, experts: int = 256) -> Iterator[Tensor]:
    """Name, dtype and shape of every tensor: `layers` layers and one multi-token-prediction one."""
    hidden, vocab = 7168, 129280
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for layer in range(layers + 1):
        start = f"model.layers.{layer}"
        if layer == layers:  # the prediction layer has copies of embedding and head
            yield f"{start}.embed_tokens.weight", "BF16", (vocab, hidden)
            yield f"{start}.enorm.weight", "BF16", (hidden,)
            yield f"{start}.hnorm.weight", "BF16", (hidden,)
            yield f"{start}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
        yield f"{start}.input_layernorm.weight", "BF16", (hidden,)
        yield f"{start}.self_attn.q_a_layernorm.weight", "BF16", (1536,)
        yield f"{start}.self_attn.kv_a_layernorm.weight", "BF16", (512,)
        for name, rows, columns in (
            ("q_a_proj", 1536, hidden),
            ("q_b_proj", 128 * 192, 1536),
            ("kv_a_proj_with_mqa", 576, hidden),
            ("kv_b_proj", 128 * 256, 512),
            ("o_proj", hidden, 128 * 128),
        ):
            yield from _fp8(f"{start}.self_attn.{name}", rows, columns)
        if layer < 3:
            yield from _mlp(f"{start}.mlp", 18432)
        else:
            yield f"{start}.mlp.gate.weight", "BF16", (experts, hidden)
            yield f"{start}.mlp.gate.e_score_correction_bias", "F32", (experts,)
            for expert in range(experts):
                yield from _mlp(f"{start}.mlp.experts.{expert}", 2048)
            yield from _mlp(f"{start}.mlp.shared_experts", 2048)
        yield f"{start}.post_attention_layernorm.weight", "BF16", (hidden,)
        if layer == layers:
            yield f"{start}.shared_head.norm.weight", "BF16", (hidden,)
            yield f"{start}.shared_head.head.weight", "BF16", (vocab, hidden)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocab, hidden)


def _mlp(start: str, width: int) -> Iterator[Tensor]:
    yield from _fp8(f"{start}.gate_proj", width, 7168)
    yield from _fp8(f"{start}.up_proj", width, 7168)
    yield from _fp8(f"{start}.down_proj", 7168, width)


def _fp8(module: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{module}.weight", "F8_E4M3", (rows, columns)
    yield f"{module}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def num_bytes(tensor: Tensor) -> int:
    size = BYTES[tensor[1]]
    for number in tensor[2]:
        size *= number
    return size


def write_checkpoint(
    folder: Path, layers: int, files: int, *, experts: int = 256, config: Mapping[str, object] = {}
) -> int:
    """A directory with config.json, the index and `files` shards; how many tensors it has."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {**CONFIG, "num_hidden_layers": layers, "n_routed_experts": experts, **config}
    (folder / "config.json").write_text(json.dumps(made, indent=2))
    every = list(tensors(layers, experts))
    total = sum(map(num_bytes, every))
    shards: list[list[Tensor]] = [[] for _ in range(files)]
    position = 0
    for tensor in every:  # of about equal bytes, in order, as publishers cut them
        shards[position * files // total].append(tensor)
        position += num_bytes(tensor)
    places = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{files:06d}.safetensors"
        write_shard(folder / name, shard)
        places.update({tensor[0]: name for tensor in shard})
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return len(every)


def write_shard(file: Path, shard: list[Tensor]) -> None:
    """One safetensors file as the library writes it, with a hole for the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    # safetensors lays out wide types first, then by name.
    for tensor in sorted(shard, key=lambda t: (-BYTES[t[1]], t[0])):
        name, dtype, shape = tensor
        end = position + num_bytes(tensor)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + position)


if __name__ == "__main__":
    print(write_checkpoint(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))

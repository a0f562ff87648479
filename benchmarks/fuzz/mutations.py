"""Sound files of each format, and what is done to them: bits, bytes, pieces, numbers, JSON values.

Holds the making of hostile files only, each a pure function of a seed. Running on them is `run.py`.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
}
OTHERS = (
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gemma3_text", "sliding_window": 32, "layer_types": ["full_attention"] * 2},
    {"model_type": "deepseek_v3", "kv_lora_rank": 32, "q_lora_rank": 32, "n_routed_experts": 4},
    {"model_type": "mamba2", "state_size": 16, "num_heads": 4, "n_groups": 1},
    {"model_type": "qwen2_vl", "text_config": dict(CONFIG), "vision_config": {"depth": 2}},
    {"model_type": "whisper", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2},
    {"model_type": "falcon_mamba", "state_size": 16},
    {"model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 16},
)
TOKENIZER = {
    "eos_token": {"content": "<end>"},
    "added_tokens_decoder": {"2": {"content": "<end>", "special": True}},
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
GENERATION = {"eos_token_id": [2, 3], "temperature": 0.7, "max_new_tokens": 20}
HOSTILE_VALUES: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, 1e-320, 0.5, "",
    "a", "../../../etc/passwd", "\u0000", "\ud800", "x" * 5000, [], {}, [[]], [None], [0] * 1000,
    {"a": {}}, {"auto_map": "os.system"}, "NaN",
)  # fmt: skip
HOSTILE_TEXTS = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999999", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000,
    b'"\\ud800"', b"\xff\xfe", b"\x00", b"", b"null", b"'x'", b"01", b"1.", b'"' + b"y" * 100_000,
)  # fmt: skip
TENSORS = {
    "model.embed_tokens.weight": ("BF16", (50, 64)),
    "model.norm.weight": ("BF16", (64,)),
    **{
        f"model.layers.{layer}.{name}.weight": ("BF16", shape)
        for layer in range(2)
        for name, shape in (
            ("input_layernorm", (64,)),
            ("post_attention_layernorm", (64,)),
            ("self_attn.q_proj", (64, 64)),
            ("self_attn.k_proj", (32, 64)),
            ("self_attn.v_proj", (32, 64)),
            ("self_attn.o_proj", (64, 64)),
            ("mlp.gate_proj", (96, 64)),
            ("mlp.up_proj", (96, 64)),
            ("mlp.down_proj", (64, 96)),
        )
    },
}


def safetensors(rng: random.Random | None) -> bytes:
    """A file of TENSORS; sound when nothing random is given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in TENSORS.items():
        size = 2
        for number in shape:
            size *= number
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    if rng is not None and rng.random() < 0.5:
        header = mutated_object(header, rng)
    text = _dumps(header)
    length = len(text)
    if rng is not None and rng.random() < 0.2:
        length = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, position))
    return struct.pack("<Q", length % 2**64) + text + bytes(position)


def index_file(rng: random.Random) -> bytes:
    places = dict.fromkeys(TENSORS, "model.safetensors")
    made: dict[str, object] = {"metadata": {"total_size": 1000}, "weight_map": places}
    if rng.random() < 0.5:
        names = ("../x.safetensors", "/etc/passwd", "a/b.safetensors", ".", "x\x00.safetensors",
                 "sub/../../x.safetensors", "~/x.safetensors", "model.bin", "y" * 300)  # fmt: skip
        places[rng.choice(list(places))] = rng.choice(names)
    return _dumps(mutated_object(made, rng) if rng.random() < 0.7 else made)


def gguf(rng: random.Random) -> bytes:
    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    numbers = {
        "llama.block_count": 2, "llama.context_length": 128, "llama.embedding_length": 64,
        "llama.feed_forward_length": 96, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 16,
    }  # fmt: skip
    if rng.random() < 0.5:
        numbers[rng.choice(list(numbers))] = rng.choice((0, 1, 3, 7, 2**31, 2**32 - 1, 2**20))
    body = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    for key, number in numbers.items():
        body += text(key) + struct.pack("<II", 4, number)
    body += text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)
    body += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 50)
    body += b"".join(text(f"t{n}") for n in range(50))
    shapes = {"token_embd": (50, 64), "output_norm": (64,)}
    for layer in range(2):
        for name, shape in (
            ("attn_norm", (64,)), ("ffn_norm", (64,)), ("attn_q", (64, 64)), ("attn_k", (32, 64)),
            ("attn_v", (32, 64)), ("attn_output", (64, 64)), ("ffn_gate", (96, 64)),
            ("ffn_up", (96, 64)), ("ffn_down", (64, 96)),
        ):  # fmt: skip
            shapes[f"blk.{layer}.{name}"] = shape
    position, infos = 0, b""
    for name, shape in shapes.items():
        sizes = shape[::-1]
        infos += text(f"{name}.weight") + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        infos += struct.pack("<IQ", 0, position)
        size = 4
        for number in shape:
            size *= number
        position += size
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(numbers) + 3)
    start = head + body + infos
    return start.ljust(-(-len(start) // 32) * 32, b"\0") + bytes(position)


def config(rng: random.Random) -> bytes:
    made: dict[str, object] = dict(CONFIG)
    if rng.random() < 0.7:
        made.update(rng.choice(OTHERS))
    return _dumps(mutated_object(made, rng))


def tokenizer(rng: random.Random) -> bytes:
    return _dumps(mutated_object(dict(TOKENIZER), rng))


def generation(rng: random.Random) -> bytes:
    return _dumps(mutated_object(dict(GENERATION), rng))


def mutated_object(made: dict[str, object], rng: random.Random) -> dict[str, object]:
    """Some values, at any depth, replaced, removed, doubled or moved to another key."""
    made = json.loads(json.dumps(made))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place: object = made
        while True:
            keys: list[object] = (
                list(place) if isinstance(place, dict) else list(range(len(place)))  # type: ignore[arg-type]
            )
            if not keys:
                break
            key = rng.choice(keys)
            inner = place[key]  # type: ignore[index]
            if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
                place = inner
                continue
            action = rng.random()
            if action < 0.6:
                place[key] = copy.deepcopy(rng.choice(HOSTILE_VALUES))  # type: ignore[index]
            elif action < 0.75:
                del place[key]  # type: ignore[attr-defined]
            elif isinstance(inner, int) and not isinstance(inner, bool):
                place[key] = inner * rng.choice((-1, 0, 2, 1000, 10**9, 2**40))  # type: ignore[index]
            elif isinstance(place, dict):
                place[str(rng.choice(keys))] = copy.deepcopy(inner)
            break
    return made


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, doubled, or a hostile piece of text put in."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        if not data:
            break
        # Headers are what is read, so most damage goes to the front.
        at = rng.randrange(min(len(data), 4096)) if rng.random() < 0.8 else rng.randrange(len(data))
        action = rng.randrange(7)
        if action == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            data[at] = rng.randrange(256)
        elif action == 2:
            del data[at:]
        elif action == 3:
            del data[at : at + rng.randint(1, 64)]
        elif action == 4:
            data[at:at] = data[at : at + rng.randint(1, 64)] * rng.randint(1, 20)
        elif action == 5:
            data[at:at] = rng.choice(HOSTILE_TEXTS)
        else:
            number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
            data[at : at + 8] = struct.pack("<Q", number)
    return bytes(data)


def _dumps(made: object) -> bytes:
    return json.dumps(made).encode("utf-8", "surrogatepass")


def _plain(file: Path, raw: bytes) -> None:
    file.write_bytes(raw)


FORMATS: dict[str, tuple[str, Callable[[random.Random], bytes]]] = {
    "config.json": ("config.json", config),
    "safetensors": ("model.safetensors", safetensors),
    "index.json": ("model.safetensors.index.json", index_file),
    "gguf": ("model.gguf", gguf),
    "tokenizer_config.json": ("tokenizer_config.json", tokenizer),
    "generation_config.json": ("generation_config.json", generation),
}
"""Format → the file's name in its directory, and the maker of a sound or nearly sound one."""


def write_case(place: Path, kind: str, seed: int) -> Path:
    """A directory with one hostile file of that format among sound ones; the path to audit."""
    rng = random.Random(f"{kind}/{seed}")  # noqa: S311
    place.mkdir(parents=True, exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    name, make = FORMATS[kind]
    raw = make(rng)
    if rng.random() < 0.35:
        raw = damaged(raw, rng)
    if kind != "gguf":
        plain = {k: v for k, v in CONFIG.items() if k not in ("quantization_config",)}
        _plain(place / "config.json", _dumps(plain))
        _plain(place / "tokenizer_config.json", _dumps(TOKENIZER))
        _plain(place / "generation_config.json", _dumps(GENERATION))
        if kind == "index.json":
            _plain(place / "model.safetensors", safetensors(None))
    _plain(place / name, raw)
    return place / name if kind == "gguf" else place

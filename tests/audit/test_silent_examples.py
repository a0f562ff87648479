"""The pages' examples hold: what is said to be silent is, beside one that fires.

Those that are a key of the configuration or a flag are run as they are written.
"""

from __future__ import annotations

import json

import pytest
from audit_pool import config_of, write_directory
from launch_cases import SOUND, command, pod, started

from ullage.anatomy import load
from ullage.audit import find_rule, judge, prepare
from ullage.costs.deployment import Deployment, Parallel
from ullage.costs.hardware import parse_gpus

LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "eos_token_id": 2,
    "pad_token_id": 0, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip


def parallel(**sizes) -> dict:
    return {"parallel": Parallel(**sizes)}


CONFIGURATIONS = {
    "A001": ({"head_dim": 96}, {}, {}, {}),
    "A003": ({"head_dim": 45}, {}, {}, {}),
    "A004": ({"use_sliding_window": False, "sliding_window": 32768}, {},
             {"use_sliding_window": False, "sliding_window": None}, {}),
    "A021": ({"rope_theta": 10000.0}, {}, {}, {}),
    "A022": ({"rope_theta": 1e15, "max_position_embeddings": 8192}, {},
             {"rope_theta": 1e6, "max_position_embeddings": 40960}, {}),
    "A028": ({}, {"max_model_len": 200_000}, {}, {"max_model_len": 131_072}),
    "A041": ({"intermediate_size": 14332}, parallel(tensor=4), {}, parallel(tensor=4)),
    "A051": ({"rms_norm_eps": 0}, {}, {}, {}),
    "A052": ({}, {"dtype": "float16"}, {}, {"dtype": "bfloat16"}),
    "A061": ({"num_attention_heads": 64, "head_dim": 64}, parallel(tensor=3),
             {"num_attention_heads": 64, "head_dim": 64}, parallel(tensor=8)),
    "A062": ({"num_key_value_heads": 6, "num_attention_heads": 36}, parallel(tensor=4),
             {}, parallel(tensor=16)),
    "A063": ({"num_key_value_heads": 4}, parallel(tensor=8), {}, parallel(tensor=8)),
    "A064": ({"intermediate_size": 11008}, parallel(tensor=6),
             {"intermediate_size": 11008}, parallel(tensor=4)),
    "A066": ({}, parallel(tensor=5), {}, parallel(tensor=8)),
    "A067": ({"vocab_size": 50257}, {}, {}, {}),
    "A068": ({"num_hidden_layers": 61}, parallel(pipeline=4),
             {"num_hidden_layers": 60}, parallel(pipeline=4)),
    "A084": ({"quantization_config": {"quant_method": "hqq"}}, {},
             {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, {}),
    "A088": ({}, {"kv_cache_dtype": "fp8_e4m3fn"}, {}, {"kv_cache_dtype": "fp8_e4m3"}),
    "A101": ({"eos_token_id": 151936, "vocab_size": 151936}, {},
             {"eos_token_id": 151645, "vocab_size": 151936}, {}),
    "A104": ({"pad_token_id": 2}, {}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("rule_id", CONFIGURATIONS)
def test_a_configuration_and_its_twin(rule_id, tmp_path):
    fires, with_flags, silent, with_others = CONFIGURATIONS[rule_id]
    for state, change, flags in (("fired", fires, with_flags), ("clear", silent, with_others)):
        path = tmp_path / f"{state}.json"
        path.write_text(json.dumps({**LLAMA_8B, **change}))
        subject, _ = prepare(load(path), Deployment(**flags))
        finding = judge(find_rule(rule_id), subject)
        assert finding.state == state, finding


@pytest.mark.parametrize(
    ("rule_id", "gpu", "length"),
    [("A141", "H100-SXM", None), ("A142", "RTX-4090", 8192)],
)
def test_a_card_that_is_large_enough(rule_id, gpu, length, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    subject, _ = prepare(load(path), Deployment(max_model_len=length), parse_gpus(gpu))
    assert judge(find_rule(rule_id), subject).state == "clear"


TWO = pod('"64", --max-num-batched-tokens', '"64", -tp, "4", --max-num-batched-tokens')[1]
COMMANDS = {
    "A161": command("--max-model-len 8192"),
    "A162": command("--no-enable-prefix-caching --dtype float16"),
    "A163": command("--max-model-len 8192"),
    "A164": command("--max-num-batched-tokens 2048 --max-model-len 8192"),
    "A165": command("--max-num-seqs 256"),
    "A166": command(""),
    "A168": command("--served-model-name llama", "/models/llama"),
    "A169": command("--hf-overrides '{\"max_position_embeddings\": 65536}'"),
    "A171": command("--gpu-memory-utilization 0.92"),
    "A172": ("start.sh", "CUDA_VISIBLE_DEVICES=0 vllm serve a &\n"
                         "CUDA_VISIBLE_DEVICES=1 vllm serve b --headless\n"),
    "A173": ("pod.yaml", TWO.replace("nvidia.com/gpu: 1", "nvidia.com/gpu: 4")),
    "A174": ("pod.yaml", TWO.replace("8Gi", "2Gi")),
    "A175": SOUND,
    "A176": SOUND,
    "A177": command("--host 127.0.0.1"),
}  # fmt: skip


@pytest.mark.parametrize("rule_id", COMMANDS)
def test_a_command_on_which_the_rule_is_silent(rule_id, tmp_path):
    launch, deployment = started(COMMANDS[rule_id], Deployment(), tmp_path)
    place = write_directory(tmp_path / "model", config_of("llama"))
    subject, _ = prepare(load(place), deployment, launch=launch)
    assert judge(find_rule(rule_id), subject).state == "clear"

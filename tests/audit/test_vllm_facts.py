"""The tables of vLLM's facts equal what vLLM 0.32's own sources say, where they are installed."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ullage.audit import vllm

VENV = Path(os.environ.get("ULLAGE_VLLM_VENV", Path.home() / ".cache/ullage/vllm-0.32"))
SOURCES = next(iter(VENV.glob("lib/python3*/site-packages/vllm")), None)
needs_sources = pytest.mark.skipif(SOURCES is None, reason=f"no vLLM sources in {VENV}")


def text(name: str) -> str:
    return (SOURCES / name).read_text()


def function(name: str, source: str, **names: object) -> Callable:
    """One function out of a source file, compiled by itself."""
    tree = ast.parse(source)
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.decorator_list = []
    node.returns = None
    for argument in node.args.args:
        argument.annotation = None
    scope = dict(names)
    exec(compile(ast.Module([node], []), name, "exec"), scope)
    return scope[name]


def literal(name: str, source: str) -> list[str]:
    """The words of `name = Literal[...]`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return [word.value for word in node.value.slice.elts]
    raise AssertionError(name)


@needs_sources
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("v1/attention/backends/cpu_attn.py", vllm.CPU_HEAD_SIZES),
        ("v1/attention/backends/mla/cpu_mla.py", vllm.CPU_LATENT_SIZES),
        ("v1/attention/backends/flashinfer.py", vllm.FLASHINFER_HEAD_SIZES),
    ],
)
def test_head_sizes_with_a_kernel(name, ours):
    assert set(function("get_supported_head_sizes", text(name))(None)) == ours


@needs_sources
def test_backends_by_head_size():
    flash = function(
        "supports_head_size",
        text("v1/attention/backends/flash_attn.py"),
        is_fa_version_supported=lambda version: False,
    )
    triton = function("supports_head_size", text("v1/attention/backends/triton_attn.py"))
    for size in range(1, 600):
        backends = vllm.cuda_backends(size)
        assert ("FLASH_ATTN" in backends) == flash(None, size)
        assert ("TRITON_ATTN" in backends) == triton(None, size)


@needs_sources
def test_stages_are_cut_as_vllm_cuts_them():
    class Envs:
        VLLM_PP_LAYER_PARTITION = None

    class Log:
        def info(self, *words):
            pass

    cut = function("get_pp_indices", text("distributed/utils.py"), envs=Envs, logger=Log())
    for layers in (1, 2, 3, 7, 32, 61, 94, 118):
        for stages in range(1, min(layers, 17) + 1):
            ends = [cut(layers, rank, stages) for rank in range(stages)]
            assert vllm.stage_layers(layers, stages) == tuple(b - a for a, b in ends)


@needs_sources
def test_words_that_flags_and_configurations_may_use():
    methods = literal("QuantizationMethods", text("model_executor/layers/quantization/__init__.py"))
    assert set(methods) | {"auto-round"} == vllm.QUANTIZATION_METHODS
    assert set(literal("CacheDType", text("config/cache.py"))) == vllm.KV_CACHE_DTYPES
    kinds = text("model_executor/layers/rotary_embedding/__init__.py")
    named = set(re.findall(r'scaling_type == "(\w+)"', kinds))
    for group in re.findall(r"scaling_type in \[(.+?)\]", kinds):
        named |= set(re.findall(r'"(\w+)"', group))
    assert named | {"su", "mrope"} == vllm.ROPE_KINDS
    refused = re.search(
        r"_FLOAT16_NOT_SUPPORTED_MODELS = \{(.+?)\}", text("config/model.py"), re.DOTALL
    )
    assert set(re.findall(r'"(\w+)": "', refused[1])) == vllm.FLOAT16_REFUSED


@needs_sources
def test_numbers():
    marlin = text("model_executor/layers/quantization/utils/marlin_utils.py")
    assert f"GPTQ_MARLIN_MIN_THREAD_N = {vllm.MARLIN_MULTIPLE_OUT}\n" in marlin
    assert f"GPTQ_MARLIN_MIN_THREAD_K = {vllm.MARLIN_MULTIPLE_IN}\n" in marlin
    vocabulary = text("model_executor/layers/vocab_parallel_embedding.py")
    assert f"DEFAULT_VOCAB_PADDING_SIZE = {vllm.VOCABULARY_PADDING}\n" in vocabulary


@needs_sources
@pytest.mark.parametrize(("width", "ranks"), [(704, 8), (1856, 8)])
def test_scales_of_experts_are_rounded_down_without_a_word(width, ranks):
    """A082 on NVFP4 experts: run as it is, vLLM's loader pairs weights with others' scales."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    load = function(
        "_load_w2", text("model_executor/layers/fused_moe/routed_experts.py"), torch=torch
    )

    class Layer:
        class moe_config:
            class moe_parallel_config:
                tp_size = ranks

        _get_hidden_dim = staticmethod(lambda shard_dim, ndim: 0)
        _narrow_expert_data_for_padding = staticmethod(lambda expert_data, weight, **_: expert_data)

    scales = torch.arange(width // 16).float()[None]
    for rank in range(ranks):
        mine = torch.empty(1, width // ranks // 16)
        load(Layer, shard_dim=1, loaded_weight=scales, expert_data=mine, tp_rank=rank)
        needed = rank * (width // ranks) / 16
        assert (mine[0, 0] == needed) == (rank == 0)


def test_stages_sum_to_the_layers():
    for layers in range(1, 70):
        for stages in range(1, layers + 1):
            shares = vllm.stage_layers(layers, stages)
            assert sum(shares) == layers and max(shares) - min(shares) <= 1

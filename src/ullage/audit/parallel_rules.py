"""The table of the rules on parallel sizes: identities and texts.

Holds data; the checks are in `parallelism.py`.
"""

from __future__ import annotations

from ullage.audit import parallelism as check
from ullage.audit.rule import Rule
from ullage.findings.finding import Severity

RULES = (
    Rule(
        id="A061",
        title="Attention heads per tensor-parallel rank",
        severity=Severity.error,
        category="parallelism",
        why="Each rank computes whole heads; there is no fraction of a head.",
        fix="Choose a tensor-parallel size that divides num_attention_heads.",
        source="vllm 0.32: config/model.py, verify_with_parallel_config",
        example="num_attention_heads 64 at --tensor-parallel-size 3",
        check=check.heads_divide,
    ),
    Rule(
        id="A062",
        title="KV heads per tensor-parallel rank",
        severity=Severity.error,
        category="parallelism",
        why="A rank holds whole KV heads: a share of them when there are enough, otherwise one "
        "copy. Sizes in between have no assignment.",
        fix="Choose a tensor-parallel size that divides num_key_value_heads or is a multiple.",
        source="vllm 0.32: model_executor/layers/linear.py, QKVParallelLinear",
        example="num_key_value_heads 6 at --tensor-parallel-size 4",
        check=check.kv_heads_divide,
    ),
    Rule(
        id="A063",
        title="KV copies under tensor parallelism",
        severity=Severity.info,
        category="parallelism",
        why="Once there are more ranks than KV heads (latent attention has one), heads are "
        "copied: more ranks hold no more tokens each, and plans that divide KV by the rank count "
        "promise too much.",
        fix="Use data parallelism for more KV room.",
        source="vllm 0.32: config/model.py, get_num_kv_heads; Qwen3-235B at 8 ranks holds 28 "
        "requests where a division says 57",
        example="num_key_value_heads 4 at --tensor-parallel-size 8",
        check=check.kv_is_not_copied,
    ),
    Rule(
        id="A064",
        title="Gate and up columns per tensor-parallel rank",
        severity=Severity.error,
        category="parallelism",
        why="A gated feed-forward multiplies gate and up column by column, so both halves of a "
        "column must be on one rank. Engines cut the two matrices separately and need equal "
        "shares; a fused gate_up matrix cut as one would part them.",
        fix="Choose a tensor-parallel size that divides the width, or keep experts whole.",
        source="vllm 0.32: model_executor/layers/linear.py, MergedColumnParallelLinear; "
        "fused_moe/config.py",
        example="intermediate_size 11008 at --tensor-parallel-size 6",
        check=check.gate_and_up_divide,
    ),
    Rule(
        id="A065",
        title="Experts per expert-parallel rank",
        severity=Severity.warning,
        category="parallelism",
        why="Expert parallelism deals whole experts to tensor × data ranks. Uneven shares make "
        "every step wait for the fullest rank, and a dense model has nothing to deal.",
        fix="Choose sizes whose product divides the number of experts.",
        source="vllm 0.32: config/model.py; fused_moe/expert_map_manager.py",
        example="--enable-expert-parallel on 128 experts over 6 ranks",
        check=check.experts_divide,
    ),
    Rule(
        id="A066",
        title="Vocabulary rows per tensor-parallel rank",
        severity=Severity.error,
        category="parallelism",
        why="The embedding is cut by rows after padding them to a multiple of 64, so powers of "
        "two up to 64 always fit and 3, 5 or 6 only sometimes.",
        fix="Choose a tensor-parallel size that divides the padded vocabulary.",
        source="vllm 0.32: model_executor/layers/vocab_parallel_embedding.py",
        example="vocab_size 128256 at --tensor-parallel-size 5",
        check=check.vocabulary_divides,
    ),
    Rule(
        id="A067",
        title="Vocabulary padding",
        severity=Severity.info,
        category="parallelism",
        why="vLLM adds empty rows up to a multiple of 64, so its embedding is larger than the "
        "checkpoint's.",
        fix="Count the added rows.",
        source="vllm 0.32: model_executor/layers/vocab_parallel_embedding.py",
        example="vocab_size 50257: 47 rows are added",
        check=check.vocabulary_needs_no_padding,
    ),
    Rule(
        id="A068",
        title="Layers per pipeline stage",
        severity=Severity.info,
        category="parallelism",
        why="The slowest stage sets the pace and the largest one the memory; a stage without a "
        "layer cannot be.",
        fix="Choose a pipeline size that divides the layers, or set VLLM_PP_LAYER_PARTITION.",
        source="vllm 0.32: distributed/utils.py, get_pp_indices",
        example="61 layers at --pipeline-parallel-size 4",
        check=check.stages_are_even,
    ),
    Rule(
        id="A069",
        title="Recurrent state per tensor-parallel rank",
        severity=Severity.error,
        category="parallelism",
        why="State-space and linear-attention layers are cut by heads and groups; a single group "
        "may be copied, several must be divided.",
        fix="Choose a tensor-parallel size that divides the state's heads and groups.",
        source="vllm 0.32: model_executor/layers/mamba/{mamba_mixer2,gdn/qwen_gdn_linear_attn}.py",
        example="16 linear-attention key heads at --tensor-parallel-size 32",
        check=check.state_divides,
    ),
    Rule(
        id="A070",
        title="Devices for the parallel sizes",
        severity=Severity.error,
        category="parallelism",
        why="Tensor × pipeline × data ranks need a device each.",
        fix="Make the product of the parallel sizes equal the number of devices.",
        source="vllm 0.32: config/parallel.py, world_size_across_dp",
        example="--gpu H100-SXM:4 --tensor-parallel-size 8",
        check=check.devices_suffice,
    ),
)

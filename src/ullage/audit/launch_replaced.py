"""Flags that a server's parser does not have (any more), and what to write instead. Data.

The parsers themselves are recorded in `launch/*_flags.tsv`.
"""

from __future__ import annotations

REPLACED = {
    "--swap-space": "drop it: preempted requests are computed again",
    "--preemption-mode": "drop it: preempted requests are computed again",
    "--use-v2-block-manager": "drop it: there is one block manager",
    "--num-scheduler-steps": "drop it: --async-scheduling overlaps the steps",
    "--multi-step-stream-outputs": "drop it",
    "--scheduler-delay-factor": "drop it",
    "--num-lookahead-slots": "drop it",
    "--disable-log-requests": "drop it: requests are logged only with --enable-log-requests",
    "--disable-async-output-proc": "drop it: --no-async-scheduling is the nearest",
    "--max-seq-len-to-capture": "use --cudagraph-capture-sizes",
    "--cuda-graph-sizes": "use --cudagraph-capture-sizes",
    "--full-cuda-graph": 'use --compilation-config \'{"cudagraph_mode": "FULL"}\'',
    "--task": "use --runner and --convert",
    "--device": "drop it: the installed build decides",
    "--enable-reasoning": "use --reasoning-parser alone",
    "--guided-decoding-backend": "use --structured-outputs-config '{\"backend\": …}'",
    "--speculative-model": "use --speculative-config '{\"model\": …}'",
    "--num-speculative-tokens": "use --speculative-config '{\"num_speculative_tokens\": …}'",
    "--rope-scaling": "use --hf-overrides '{\"rope_parameters\": …}'",
    "--rope-theta": "use --hf-overrides '{\"rope_parameters\": …}'",
    "--worker-use-ray": "use --distributed-executor-backend ray",
    "--disable-mm-preprocessor-cache": "use --mm-processor-cache-gb 0",
    "--quantization-param-path": "drop it: the checkpoint carries the scales",
    "--lora-extra-vocab-size": "drop it",
    "--long-lora-scaling-factors": "drop it",
    "--max-num-partial-prefills": "drop it",
    "--max-long-partial-prefills": "drop it",
}
"""Flags of older vLLM versions that 0.32's parser no longer has, and what to do instead."""


SGLANG_REPLACED = {
    "--cuda-graph-max-bs": "use --cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "use --cuda-graph-bs-decode",
    "--gpu-memory-utilization": "use --mem-fraction-static, which covers weights and KV alone",
    "--max-model-len": "use --context-length",
    "--max-num-seqs": "use --max-running-requests",
    "--max-num-batched-tokens": "use --chunked-prefill-size",
    "--enable-prefix-caching": "drop it: prefixes are cached unless --disable-radix-cache",
    "--hf-overrides": "use --json-model-override-args",
    "--speculative-config": "use --speculative-algorithm and its companions",
    "--enforce-eager": "use --cuda-graph-backend-decode disabled",
}
"""Flags of older SGLang versions or of vLLM that SGLang 0.5.23 does not take."""

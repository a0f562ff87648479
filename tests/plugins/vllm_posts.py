"""Every path that some vLLM of 0.30 to 0.33 answers a POST on, and whether it asks the model.

Collected from the decorators under vllm/entrypoints of the four versions, and from the two routes
that they add by `add_api_route`. The live suite holds vLLM 0.32 to it.
"""

from __future__ import annotations

WORK = frozenset(
    {
        *("/classify", "/detokenize", "/generative_scoring", "/inference/v1/generate"),
        *("/invocations", "/pooling", "/rerank", "/score", "/tokenize"),
        *("/cohere/v2/chat", "/cohere/v2/chat/render", "/v2/embed", "/v2/rerank"),
        *("/v1/audio/transcriptions", "/v1/audio/translations"),
        *("/v1/chat/completions", "/v1/chat/completions/batch"),
        *("/v1/chat/completions/derender", "/v1/chat/completions/render"),
        *("/v1/completions", "/v1/completions/derender", "/v1/completions/render"),
        *("/v1/decisions", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/systemone"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"),
        *("/v1/responses", "/v1/responses/render"),
    }
)
"""A client's work, also where only the tokenizer does it: another replica can take it."""
OPERATORS = frozenset(
    {
        *("/abort_requests", "/inference/v1/abort_requests", "/v1/responses/{response_id}/cancel"),
        *("/collective_rpc", "/fault_tolerance/apply", "/ping", "/weight_checker"),
        *("/pause", "/resume", "/sleep", "/wake_up"),
        *("/is_scaling_elastic_ep", "/scale_elastic_ep"),
        *("/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache"),
        *("/reset_prefix_cache", "/start_profile", "/stop_profile"),
        *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
        *("/start_weight_update", "/start_draft_weight_update", "/finish_weight_update"),
        *("/update_weights", "/update_weight_version"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)
"""What ends, changes or asks about what runs here, and brings no new work."""

"""llama.cpp's logits: `python llama_cpp_logits.py FILE.gguf TOKENS.npy OUT.npy`.

A script of its own, since llama-cpp-python is not among the test dependencies. Everything float32,
flash attention off.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp as lc
import numpy as np


def logits(file: str, tokens: np.ndarray) -> np.ndarray:
    """float32 [tokens, vocab]."""
    model_params = lc.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = lc.llama_model_load_from_file(file.encode(), model_params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {file}")
    params = lc.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = 0  # GGML_TYPE_F32
    params.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = lc.llama_init_from_model(model, params)
    batch = lc.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index] = int(token), index
        batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
    if lc.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")
    size = (lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model)),)
    rows = [lc.llama_get_logits_ith(context, index) for index in range(len(tokens))]
    return np.stack([np.ctypeslib.as_array(row, shape=size).copy() for row in rows])


if __name__ == "__main__":
    silent = lc.llama_log_callback(lambda *_: None)
    lc.llama_log_set(silent, ctypes.c_void_p(0))
    np.save(sys.argv[3], logits(sys.argv[1], np.load(sys.argv[2])))

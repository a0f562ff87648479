"""Files of weights → tensors: safetensors headers, shard indexes, pickles by opcode."""

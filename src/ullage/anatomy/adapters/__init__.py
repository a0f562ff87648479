"""LoRA adapters as their files tell them: configuration, keys, tensors, modules."""

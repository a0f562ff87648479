"""LoRA adapters: what one is, and what an engine makes of it."""

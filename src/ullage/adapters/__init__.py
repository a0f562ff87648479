"""LoRA adapters: what one holds, what an engine makes of it, and how to repair it."""

"""GGUF: its header, its metadata as a configuration, its tensor names."""

"""Adapters asked of a real vLLM 0.32 server: recipes, the server, and what it answered."""

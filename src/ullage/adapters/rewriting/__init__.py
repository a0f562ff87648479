"""Adapters rewritten to what an engine reads."""

"""Findings over an adapter, its base and an engine's answer."""

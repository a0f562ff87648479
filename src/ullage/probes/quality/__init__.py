"""Answers that make no sense, seen in the engine's own stream without keeping text."""

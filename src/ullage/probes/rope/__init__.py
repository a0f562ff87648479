"""Rotary tables as they are built, against exact ones."""

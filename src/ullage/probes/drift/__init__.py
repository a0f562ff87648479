"""Sizes of activations, and whether they moved."""

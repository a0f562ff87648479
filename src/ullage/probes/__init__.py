"""Probes: is the model itself still sane? Attention, weights, positions, numerics, answers.

A package for each thing that is looked at. None of them prints; `ullage.cli` has the commands.
"""

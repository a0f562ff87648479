"""Probes: is the model itself still sane? Readings of attention, positions and weights.

What is measured is `readings`; how, the modules beside it, which do the heavy imports.
"""

"""Loops for the processor, compiled by numba: matrix products, the decode step, its threads.

Nothing here imports torch, and nothing above needs numba: `compiling.available()` says whether
there is machine code, and the paths in torch give the same answers where there is none.
"""

"""Encoders: every token sees every other, in one pass, so nothing is kept for later.

`embedder.Embedder` is the whole of it: texts in, vectors out.
"""

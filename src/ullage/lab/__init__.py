"""Experiments: one per serving mechanism, each measured here and now, and said in one sentence.

`run.run_lab` runs them, `registry` lists them, `html/` shows them. Nothing is imported here.
"""

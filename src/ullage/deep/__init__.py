"""The weights themselves: every tensor's bytes read once, and what they say.

`readings.py` holds the values (no numpy), `scan.py` streams a checkpoint and needs numpy. Importing
this package imports neither.
"""

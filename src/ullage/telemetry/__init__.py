"""Live engines → Snapshot: expositions, one dialect per engine, histograms, scraping, PromQL.

`snapshot.py` holds the vocabulary. What the numbers mean for an operator is `watch`.
"""

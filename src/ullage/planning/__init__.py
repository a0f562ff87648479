"""What to run where: an engine's own decisions, the memory ledger, what fits."""

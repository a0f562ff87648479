"""config.json → `ModelSpec`: keys checked, sources kept, leftovers listed."""

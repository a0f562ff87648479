"""Whether two models, servers or files are the same model: fingerprints, and comparing them."""

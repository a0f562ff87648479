"""Who holds which KV blocks: the pool, the prefix cache, block tables and the groups of layers.

Accounting only, without torch; the bytes lie in `kv`.
"""

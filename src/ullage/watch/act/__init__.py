"""A policy, and what is done by it: when the cache stays full, end the oldest requests, or drain.

`policy.py` reads POLICY.toml, `decide.py` is the state machine, `perform.py` asks the engine,
`journal.py` keeps what was done, `actor.py` joins them. What is wrong is the rules' to say.
"""

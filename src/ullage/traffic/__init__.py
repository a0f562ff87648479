"""Requests for a server and what comes back: traces, prompts, load, summaries, an engine to try.

Holds what `checkup` and `lab` send; what they make of it is theirs.
"""

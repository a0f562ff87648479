"""Snapshots over time → findings: what happened, rules, incidents, and what shows them.

`view.py` says what a rule sees of one replica. Reading engines is `telemetry`.
"""

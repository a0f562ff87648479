"""Verdicts and how they are shown. `finding.py` holds the values; renderers have a module each."""

from ullage.findings.finding import Evidence, Finding, Severity, State, worst

__all__ = ["Evidence", "Finding", "Severity", "State", "worst"]

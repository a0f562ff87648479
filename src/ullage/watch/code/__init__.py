"""Alerts and dashboards as code: Prometheus rules and Grafana dashboards, of the dialects' tables.

Holds what writes them. Nothing here asks a server; `telemetry.promql` does.
"""

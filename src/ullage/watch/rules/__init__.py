"""The rules of `watch`, one module per concern; `table.py` lists them and judges replicas.

What a rule is stands in `watch/rule.py`; when a finding becomes an incident, in `incidents.py`.
"""

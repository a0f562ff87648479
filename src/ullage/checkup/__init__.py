"""One command, one report: audit, size, run and measure a model.

`trace` says what to send, `load` sends it, `metrics` reads the engine meanwhile, `machine` measures
what this computer can do, `comparison` sets predicted beside actual, `report` and `html` tell it.
"""

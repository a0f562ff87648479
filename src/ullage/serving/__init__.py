"""The embedded engine's HTTP face: OpenAI's routes, vLLM's metric names, a life cycle.

`app.start_server` starts one inside this process; `ullage serve` runs one until SIGTERM.
"""

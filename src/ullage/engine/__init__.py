"""The embedded engine: a small serving engine that runs what `anatomy` describes.

`engine.Engine` is the whole of it: add_request → schedule → run → postprocess. `request`, `blocks`
and `scheduler` import no torch; importing this package imports none either.
"""

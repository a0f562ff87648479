"""The embedded engine: a small serving engine that runs what `anatomy` describes.

`engine.Engine` is the whole of it: add_request → schedule → run → postprocess. What decides who
runs on which blocks (`request`, `blocks`, `prefix`, `tables`, `admission`, `scheduler`, `options`)
imports no torch; importing this package imports none either.
"""

import os

# Must be said before torch loads OpenMP. Threads that spin while they wait take the cores from the
# HTTP loop and from other processes: on two busy cores a decode step burnt 591 ms of processor
# time with spinning and 90 ms without (SmolLM2-135M, batch 1), and took five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

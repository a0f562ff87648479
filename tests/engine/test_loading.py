"""Reading weights holds no second copy of the model, whatever it is made into.

Measured by the system in a process of its own: the resident peak while a real model is read.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
SCRIPT = """
import json, sys
import ullage.engine, torch
from ullage.anatomy import load
from ullage.engine.linear import LINEARS
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.weights import Weights

def resident(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

torch.set_num_threads(1)
model, linear, dtype = load(sys.argv[1]), LINEARS[sys.argv[2]], getattr(torch, sys.argv[3])
linear(torch.randn(64, 64), None)  # what kernels need once
weights, before = Weights(model), resident("VmRSS")
decoder = Decoder(model.anatomy.spec, weights, linear, 2048, dtype)
print(json.dumps([resident("VmHWM") - before, resident("VmRSS") - before, decoder.weights_bytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "dtype"), [("none", "float32"), ("none", "bfloat16"), ("int8", "float32")]
)
def test_the_peak_is_the_weights_and_one_matrix(
    smollm2: Path, quantization: str, dtype: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, smollm2, quantization, dtype],
        check=True,
        capture_output=True,
        text=True,
    )
    peak, end, held = json.loads(done.stdout)
    largest = 49152 * 576 * 4  # the embedding
    assert held < peak < held + largest + 16 * MIB
    assert end < held + 16 * MIB

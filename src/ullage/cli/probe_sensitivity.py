"""`ullage probe sensitivity MODEL`: which weights matter, by changing them one at a time.

Holds flags, the table and the JSON document; the changing is `ullage.probes.sensitivity`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ullage.anatomy import load
from ullage.cli.flags import add_model_argument, positive_integer
from ullage.cli.probe_fingerprint import local, require_engine
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.probes.sensitivity.sensitivity import Ladder, Sensitivity

PERTURBATIONS = ("noise", "scale", "bitflip")
SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage probe sensitivity`."""
    add_model_argument(parser)
    parser.add_argument(
        "--perturb",
        type=_perturbations,
        default=PERTURBATIONS,
        metavar="LIST",
        help="of noise, scale, bitflip; the first one ranks (default: noise,scale,bitflip)",
    )
    parser.add_argument(
        "--tensors",
        type=_patterns,
        default=("*",),
        metavar="LIST",
        help="patterns of weights, for example layers.3.*,*.norm or layers.7.q.head.* "
        "(default: all weights, whole)",
    )
    parser.add_argument(
        "--budget",
        type=positive_integer,
        default=200,
        metavar="N",
        help="changes that are tried, each one pass over all prompts (default: 200)",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of noise and flipped elements"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """0; 1 where a weight was not restored. Raises BadInput for a model that is wrong."""
    require_engine()
    from ullage.engine.text.loading import load_tokenizer
    from ullage.probes.sameness.answers import PROMPTS
    from ullage.probes.sameness.fingerprints import memory_short
    from ullage.probes.sensitivity.sensitivity import LEAST_TOKENS, MAX_TOKENS, read

    model = load(local(args.model))
    if (short := memory_short(model)) is not None:
        raise BadUsage(short, file=args.model)
    tokenizer = load_tokenizer(model)
    longest = model.anatomy.spec.max_positions or MAX_TOKENS
    cut = [tuple(tokenizer.encode(text))[: min(MAX_TOKENS, longest)] for text in PROMPTS]
    found = read(
        model,
        [ids for ids in cut if len(ids) >= LEAST_TOKENS],
        longest,
        name=args.model,
        perturbations=args.perturb,
        patterns=args.tensors,
        budget=args.budget,
        seed=args.seed,
        tell=lambda done: _tell(done, args.budget),
    )
    if args.output == "json":
        print(json.dumps(found.to_json(), allow_nan=False))
    else:
        print("\n".join(lines(found)))
    return int(not found.restored)


def _tell(done: int, budget: int) -> None:
    end = "\r" if sys.stderr.isatty() and done < budget else "\n"
    if sys.stderr.isatty() or done % 20 == 0:
        print(f"ullage probe: {done} of at most {budget} changes", end=end, file=sys.stderr)


def lines(found: Sensitivity) -> list[str]:
    """The table."""
    from ullage.probes.sensitivity.changes import REFERENCE

    first, rounding = found.perturbations[0], found.yardstick
    left = found.selected - len(found.ranking)
    head = [
        f"{found.model}: {found.prompts} prompts, {found.tokens} tokens, "
        f"{found.passes} changes, seed {found.seed}",
        f"bfloat16 moves a logprob by {_number(rounding.logprob_nats)} nats in the mean, an "
        f"entropy by {_number(rounding.entropy_nats)}; {rounding.agreement:.1%} of next tokens "
        "stay",
        "",
        f"what moves most, by {first} {_step(first, REFERENCE[first])} "
        f"({len(found.ranking)} of {found.selected} weights)",
        f"  {'':<28} {'logprob':>9} {'KL':>9} {'entropy':>9} {'same token':>10}",
    ]
    for one in found.cells()[:SHOWN]:
        moved = one.moved
        head.append(
            f"  {one.name:<28} {_number(moved.logprob_nats):>9} {_number(moved.kl_nats):>9} "
            f"{_number(moved.entropy_nats):>9} {moved.agreement:>10.1%}"
        )
    if first == "noise" and any(one.kind == "norm" for one in found.cells()[:SHOWN]):
        head.append("  (a norm's figure hangs on which of its few numbers the noise hits: --seed)")
    head += ["", "smallest change that answers show (more than bfloat16's own movement)"]
    head += [_ladder(one) for one in found.ladders]
    if found.untested:
        head.append(f"  the budget did not reach {len(found.untested)} more")
    if left:
        head.append(f"{left} weights not changed; --budget N changes more of them")
    same = "the same bytes as before" if found.restored else "NOT WHAT THEY WERE"
    return [*head, f"weights restored: {same} (sha256 {found.checksum[:16]})"]


def _ladder(one: Ladder) -> str:
    what = f"  {one.kind:<10} {one.perturbation:<8} {one.name:<28}"
    if one.smallest is None:
        highest = one.changes[-1].step
        return f"{what} none up to {_step(one.perturbation, highest)}"
    moved = one.smallest.moved
    entropy = "not finite" if moved.entropy_nats is None else f"entropy {moved.entropy_nats:.2g}"
    size = one.smallest.relative_size
    share = "a number that is none" if size is None else f"{size:.2g} of its size"
    return f"{what} {_step(one.perturbation, one.smallest.step):<10} {share}, {entropy}"


def _step(perturbation: str, step: float) -> str:
    return f"bit {step:.0f}" if perturbation == "bitflip" else f"{step:g}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _perturbations(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= set(PERTURBATIONS) or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected some of noise,scale,bitflip")
    return found


def _patterns(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected names or patterns of weights")
    return found


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected a whole number, 0 or more")
    return int(text)

"""A real vLLM 0.32 server on this machine is asked about every recipe of tests/adapters/live.

It must answer as recorded (so the fast suite rests on the truth), ullage's verdicts must be what
it did, and what `ullage adapter fix` wrote must load and give the log probabilities of PEFT.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(3000),
    pytest.mark.filterwarnings("ignore"),  # peft's and transformers' own, on odd adapters
]

SETUP = Path(__file__).parents[2] / "tools" / "vllm_setup.sh"
RECORDS = {
    record["name"]: record
    for record in map(
        json.loads, (Path(__file__).parent / "live" / "outcomes.jsonl").read_text().splitlines()
    )
}
MODELS = sorted({record["model"] for record in RECORDS.values()})


DRAWS = 60
DEFAULT_SEED = 62_786


@dataclass(frozen=True, slots=True)
class Asked:
    """Recipe name → what was asked and what the server did; `refused`: why fix would not."""

    outcomes: dict[str, tuple[object, object]]
    refused: dict[str, str]

    def of(self, model: str) -> Iterator[tuple[str, object, object]]:
        for name, (made, outcome) in self.outcomes.items():
            if made.recipe.model == model:
                yield name, made, outcome


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Asked:
    """Everything in one go: a launcher, then one server for each model and its flags."""
    import torch

    from tests.adapters.live import draws, fixing, outcomes, table
    from tests.adapters.live.server import launcher

    home = os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32"
    python = Path(home).expanduser() / "bin" / "python"
    if not python.exists():
        subprocess.run(["bash", str(SETUP)], check=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("live")
    made = outcomes.make([*table.TABLE, *(draws.draw(n) for n in _numbers())], folder)
    written, refused = fixing.fixed(made, folder / "fixed")
    both = sorted([*made, *written], key=lambda one: (one.recipe.model, one.recipe.flags))
    with launcher(python) as servers:
        said = {one.recipe.name: (one, outcome) for one, outcome in outcomes.ask(servers, both)}
    torch.set_num_threads(threads)
    return Asked(said, refused)


def _numbers() -> range:
    """Which adapters are drawn: always the same ones, or from ULLAGE_VLLM_SEED on (`random`)."""
    asked = os.environ.get("ULLAGE_VLLM_SEED") or str(DEFAULT_SEED)
    first = random.SystemRandom().randrange(10**6) if asked == "random" else int(asked)
    return range(first, first + DRAWS)


@pytest.mark.parametrize("model", MODELS)
def test_the_server_does_what_was_recorded(asked, model):
    differences = [
        f"{name}: recorded {record['outcome']} {record['message']}, now {outcome}"
        for name, _, outcome in asked.of(model)
        if (record := RECORDS.get(name)) is not None
        and (record["outcome"], record["message"]) != (outcome.outcome, outcome.message)
    ]
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("model", MODELS)
def test_the_verdict_is_what_the_server_did(asked, model):
    from tests.adapters.live.verdicts import disagreement
    from tests.adapters.test_outcomes import NOT_YET, TOLD_OTHERWISE
    from ullage.anatomy import load

    wrong, asked_about = [], 0
    for name, made, outcome in asked.of(model):
        if name in (*TOLD_OTHERWISE, *NOT_YET) or name.endswith("@fixed"):
            continue
        recipe = made.recipe
        record = {
            **asdict(outcome),
            "flags": recipe.flags,
            "request": recipe.request,
            "unseen": recipe.unseen,
        }
        difference = disagreement(record, made.adapter, load(str(made.base)).anatomy.spec)
        asked_about += 1
        if difference is not None:
            wrong.append(f"{name}: {difference}")
    assert not wrong, "\n".join(wrong)
    assert asked_about >= 1


@pytest.mark.parametrize("model", MODELS)
def test_what_fix_wrote_does_what_training_meant(asked, model):
    """Without a meaning of training there is nothing to compare; `fix` then has the shapes."""
    wrong = [
        f"{name}: {outcome}"
        for name, made, outcome in asked.of(model)
        if name.endswith("@fixed") and made.meant is not None and outcome.outcome != "as_trained"
    ]
    assert not wrong, "\n".join(wrong)


FIXED = (
    *(f"llama/{name}" for name in ("state-dict", "compiled-outside", "compiled-inside")),
    *(f"llama/orig-mod-{place}" for place in ("first", "inside", "per-layer")),
    *(f"llama/fsdp-{place}" for place in ("first", "inside", "per-layer")),
    *(f"llama/{name}" for name in ("checkpointing", "ddp-first", "ddp-inside", "name-kept")),
    *(
        f"llama/{name}"
        for name in ("model-missing", "only-layers", "wrong-parent", "mlx", "sharded")
    ),
    *("llama/fused-qkv-keys", "llama/fused-gate-up-keys", "phi3/split-qkv", "phi3/split-gate-up"),
    *(f"{model}/text-bare" for model in ("gemma3", "llava", "qwen2.5-vl", "qwen3-vl-moe")),
    *("opt/decoder-missing", "mixtral/router", "mixtral/per-expert"),
)
"""What can be mended without doubt."""


def test_fix_mends_what_can_be_mended(asked):
    missing = {
        name: asked.refused.get(name) for name in FIXED if f"{name}@fixed" not in asked.outcomes
    }
    assert not missing


def test_fix_refuses_what_cannot_be_told(asked):
    assert "llama/dora" in asked.refused
    assert "llama/unknown-all" in asked.refused
    assert "llama/layers-some-beyond" in asked.refused
    assert "llama/out-too-small" in asked.refused
    for name in ("config-r-4", "config-r-64", "tensors-rank-16", "config-alpha-null", "diffusers"):
        assert f"llama/{name}" in asked.refused
    assert "phi3/split-qkv-rank-8" in asked.refused  # side by side, the three have rank 24

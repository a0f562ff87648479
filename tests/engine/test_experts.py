"""Mixtures of experts against transformers' own blocks, and the grouping against a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.anatomy.naming.row import ExpertLayout
from ullage.anatomy.spec import Experts
from ullage.engine.linear import FloatLinear, Int8Linear
from ullage.engine.model.experts import MixtureOfExperts, mixed, read_mixture, route

HIDDEN, WIDTH, NUM = 32, 24, 6


def _block(family: str, **keys: Any) -> torch.nn.Module:
    """A sparse block of transformers with random weights."""
    import transformers
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": 2}
    if family == "mixtral":
        config: Any = transformers.MixtralConfig(
            **sizes, intermediate_size=WIDTH, num_local_experts=NUM
        )
        block: torch.nn.Module = MixtralSparseMoeBlock(config)
    else:
        sizes |= {"moe_intermediate_size": WIDTH, "num_experts": NUM}
        if family == "qwen2_moe":
            config = transformers.Qwen2MoeConfig(
                **sizes, shared_expert_intermediate_size=40, **keys
            )
            block = Qwen2MoeSparseMoeBlock(config)
        else:
            config = transformers.Qwen3MoeConfig(**sizes, **keys)
            block = Qwen3MoeSparseMoeBlock(config)
    torch.manual_seed(3)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block


def _mixture(
    block: torch.nn.Module, renormalise: bool, layout: ExpertLayout = "each", linear: Any = None
) -> MixtureOfExperts:
    """Ours, out of the block's tensors as they would lie on disk in `layout`."""
    held = dict(block.named_parameters())
    gate_up, down = held["experts.gate_up_proj"].data, held["experts.down_proj"].data
    shared = "shared_expert.gate_proj.weight" in held
    where = {
        "router": held["gate.weight"].data,
        "e_gate_up": {
            "stacked": gate_up,
            "stacked_in_out": gate_up.transpose(1, 2),
            "stacked_split": gate_up[:, :WIDTH],
        }.get(layout),
        "e_all_up": gate_up[:, WIDTH:],
        "e_all_down": down.transpose(1, 2) if layout == "stacked_in_out" else down,
        "e_gate": gate_up[:, :WIDTH],
        "e_up": gate_up[:, WIDTH:],
        "e_down": down,
    }
    if shared:
        where |= {
            f"s_{part}": held[f"shared_expert.{part}_proj.weight"].data
            for part in ("gate", "up", "down")
        }
        where["shared_gate"] = held["shared_expert_gate.weight"].data

    def read(slot: str, shape: tuple[int, ...], expert: int | None = None) -> torch.Tensor:
        found = where[slot]
        assert found is not None
        tensor = found if expert is None else found[expert]
        assert tensor.shape == shape, slot
        return tensor

    ff = Experts(
        num_experts=NUM,
        top_k=2,
        intermediate=WIDTH,
        activation="silu",
        gated=True,
        shared_intermediate=40 if shared else 0,
        shared_gate=shared,
    )
    return read_mixture(
        ff, HIDDEN, layout, read, linear or FloatLinear, F.silu, renormalise=renormalise
    )


@pytest.mark.parametrize(
    ("family", "keys", "renormalise"),
    [
        ("mixtral", {}, True),
        ("qwen2_moe", {"norm_topk_prob": False}, False),
        ("qwen2_moe", {"norm_topk_prob": True}, True),
        ("qwen3_moe", {"norm_topk_prob": True}, True),
        ("qwen3_moe", {"norm_topk_prob": False}, False),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 17])
@torch.inference_mode()
def test_a_mixture_equals_that_of_transformers(
    family: str, keys: dict[str, bool], renormalise: bool, num_tokens: int
) -> None:
    block = _block(family, **keys)
    x_TE = torch.randn(num_tokens, HIDDEN)
    theirs = block(x_TE[None])[0]
    torch.testing.assert_close(_mixture(block, renormalise)(x_TE), theirs, rtol=1e-5, atol=1e-5)
    # The other way to weigh is another function: the test would see it.
    assert not torch.allclose(_mixture(block, not renormalise)(x_TE), theirs, atol=1e-3)


@pytest.mark.parametrize("layout", ["stacked", "stacked_in_out", "stacked_split"])
@torch.inference_mode()
def test_every_layout_on_disk_gives_the_same_experts(layout: ExpertLayout) -> None:
    block = _block("mixtral")
    x_TE = torch.randn(9, HIDDEN)
    assert torch.equal(
        _mixture(block, True, layout)(x_TE),
        _mixture(block, True)(x_TE),
    )


@torch.inference_mode()
def test_int8_experts_route_as_float_ones_and_err_little() -> None:
    block = _block("qwen2_moe", norm_topk_prob=True)
    x_TE = torch.randn(64, HIDDEN)
    exact, rough = _mixture(block, True), _mixture(block, True, linear=Int8Linear)
    assert torch.equal(exact.router(x_TE), rough.router(x_TE))
    error = (exact(x_TE) - rough(x_TE)).norm() / exact(x_TE).norm()
    assert 0 < error < 0.1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_grouping_equals_running_each_token_alone(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, num_experts))
    num_tokens = data.draw(st.integers(1, 12))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    matrices = torch.randn(num_experts, 5, 5, dtype=torch.float64)
    x_TE = torch.randn(num_tokens, 5, dtype=torch.float64)
    logits = torch.randn(num_tokens, num_experts)
    weights_TK, chosen_TK = route(logits, top_k, renormalise=True)
    torch.testing.assert_close(weights_TK.sum(-1), torch.ones(num_tokens))
    runs: list[int] = []

    def expert(index: int) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            runs.append(index)
            return x @ matrices[index]

        return run

    ours = mixed([expert(index) for index in range(num_experts)], x_TE, weights_TK, chosen_TK)
    alone = [
        sum(
            weights_TK[token, k].double() * (x_TE[token] @ matrices[chosen_TK[token, k]])
            for k in range(top_k)
        )
        for token in range(num_tokens)
    ]
    torch.testing.assert_close(ours, torch.stack(alone))
    assert sorted(runs) == sorted(set(chosen_TK.flatten().tolist()))

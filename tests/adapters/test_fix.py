"""What `adapter fix` writes is taken whole by the engine, and PEFT computes with it as before."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters.peft_adapters import CASES, make_adapter, make_base, make_model, save_base
from ullage.adapters.check import check
from ullage.adapters.engines.table import ENGINES, Engine
from ullage.adapters.rewriting.fix import Fixed, fix
from ullage.adapters.rewriting.placing import FixRefused
from ullage.adapters.verdict import EngineAnswer, ModuleVerdict, ServeOptions, State
from ullage.anatomy import load
from ullage.anatomy.adapters.read import read_adapter
from ullage.anatomy.spec import ModelSpec
from ullage.cli.main import main
from ullage.errors import BadUsage

OPTIONS = ServeOptions(engine="vllm", max_lora_rank=64)
IDS = torch.arange(3, 40)[None]
Spec = Callable[[str], ModelSpec]
# Before: what vLLM makes of it as it is.
FIXED = {
    "plain": "works",
    "custom name": "works",
    "patterns": "works",
    "rslora patterns": "works",
    "embeddings": "works",
    "tied embedding": "works",
    "fused": "works",
    "classifier": "works",
    "compiled": "no_effect",
    "compiled layers": "no_effect",
    "ddp": "rejected",
    "fsdp": "rejected",
    "fsdp layers": "no_effect",
    "checkpointed": "no_effect",
    "name kept": "rejected",
    "one model short": "no_effect",
}
REFUSED = {
    "plain bin": "a pickle, which is never loaded",
    "dora": "more than base + scale·B·A",
    "lora bias": "biases were trained too",
    "modules_to_save": "vLLM only supports modules_to_save",
    "trainable tokens": "holds trainable_tokens_delta and no pair",
    "pissa": "changed the base weights",
    "gpt2": "GPT2LMHeadModel does not support LoRA yet.",
    "vera": "an adapter of type VERA",
    "moe experts": "--enable-mixed-moe-lora-format",
    "vision-language": "names no module of this base model",
}


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: save_base(kind, tmp_path_factory.mktemp("base") / kind))


@pytest.fixture(scope="module")
def spec(base_dir: Callable[[str], Path]) -> Spec:
    return cache(lambda kind: load(base_dir(kind)).anatomy.spec)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=IDS).logits


def under_peft(base: Any, adapter: Path) -> torch.Tensor:
    """The logits of `base` with the adapter as PEFT loads it, every key of it used."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits(peft.PeftModel.from_pretrained(base, str(adapter)))


@pytest.mark.parametrize("name", FIXED)
def test_it_works_and_equals_the_trained_model(name: str, spec: Spec, tmp_path: Path) -> None:
    adapter = read_adapter(make_adapter(name, tmp_path))
    kind = CASES[name].base
    assert check(adapter, spec(kind), OPTIONS).verdict == FIXED[name]
    before = {file: Path(file).read_bytes() for file in adapter.files}
    fixed = fix(adapter, spec(kind), OPTIONS, tmp_path / "fixed")
    assert fixed.judgement.verdict == "works"
    assert fixed.judgement.matched == fixed.judgement.total == len(adapter.modules)
    trained = logits(make_model(name))
    assert (trained - logits(make_base(kind))).abs().max() > 0.1
    assert torch.allclose(under_peft(make_base(kind), tmp_path / "fixed"), trained, atol=1e-5)
    assert before == {file: Path(file).read_bytes() for file in adapter.files}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_certain_is_refused_and_leaves_nothing(
    name: str, spec: Spec, tmp_path: Path
) -> None:
    adapter = read_adapter(make_adapter(name, tmp_path / "made"))
    with pytest.raises(FixRefused) as refusal:
        fix(adapter, spec(CASES[name].base), OPTIONS, tmp_path / "out" / "fixed")
    assert REFUSED[name] in str(refusal.value)
    assert not list(tmp_path.glob("out/*"))


# --- fused and split -----------------------------------------------------------------------------


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["x"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(known))
    return folder


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def added(kind: str, changes: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of the base with `changes` added to the weights that they name."""
    base = make_base(kind)
    state = base.state_dict()
    for name, change in changes.items():
        state[f"{name}.weight"] += change
    return logits(base)


LAYER = "model.layers.1"
HIDDEN, INNER, Q, KV = 64, 128, 64, 32  # of the tiny Llama and Phi-3


def test_fused_pairs_are_split_for_a_split_base(spec: Spec, tmp_path: Path) -> None:
    qkv_a, qkv_b = drawn(1, 4, HIDDEN), drawn(2, Q + 2 * KV, 4)
    up_a, up_b = drawn(3, 4, HIDDEN), drawn(4, 2 * INNER, 4)
    prefix = f"base_model.model.{LAYER}"
    made = write(
        tmp_path / "made",
        {
            f"{prefix}.self_attn.qkv_proj.lora_A.weight": qkv_a,
            f"{prefix}.self_attn.qkv_proj.lora_B.weight": qkv_b,
            f"{prefix}.mlp.gate_up_proj.lora_A.weight": up_a,
            f"{prefix}.mlp.gate_up_proj.lora_B.weight": up_b,
        },
    )
    adapter = read_adapter(made)
    assert check(adapter, spec("llama"), OPTIONS).verdict != "works"
    fixed = fix(adapter, spec("llama"), OPTIONS, tmp_path / "fixed")
    assert (fixed.judgement.matched, fixed.judgement.verdict) == (5, "works")
    q, k, v = (2 * qkv_b @ qkv_a).split([Q, KV, KV])
    gate, up = (2 * up_b @ up_a).split([INNER, INNER])
    wanted = added(
        "llama",
        {
            f"{LAYER}.self_attn.q_proj": q,
            f"{LAYER}.self_attn.k_proj": k,
            f"{LAYER}.self_attn.v_proj": v,
            f"{LAYER}.mlp.gate_proj": gate,
            f"{LAYER}.mlp.up_proj": up,
        },
    )
    assert torch.allclose(under_peft(make_base("llama"), tmp_path / "fixed"), wanted, atol=1e-5)


def test_split_pairs_are_joined_for_a_fused_base(spec: Spec, tmp_path: Path) -> None:
    """With different ranks and scales, and K left out: its rows of the fused B are zero."""
    q_a, q_b = drawn(1, 4, HIDDEN), drawn(2, HIDDEN, 4)
    v_a, v_b = drawn(3, 2, HIDDEN), drawn(4, KV, 2)
    prefix = f"base_model.model.{LAYER}.self_attn"
    made = write(
        tmp_path / "made",
        {
            f"{prefix}.q_proj.lora_A.weight": q_a,
            f"{prefix}.q_proj.lora_B.weight": q_b,
            f"{prefix}.v_proj.lora_A.weight": v_a,
            f"{prefix}.v_proj.lora_B.weight": v_b,
        },
        rank_pattern={"v_proj": 2},
        alpha_pattern={"v_proj": 6},
    )
    fixed = fix(read_adapter(made), spec("phi3"), OPTIONS, tmp_path / "fixed")
    assert (fixed.judgement.matched, fixed.judgement.verdict) == (1, "works")
    change = torch.cat([2 * q_b @ q_a, torch.zeros(KV, HIDDEN), 3 * v_b @ v_a])
    wanted = added("phi3", {f"{LAYER}.self_attn.qkv_proj": change})
    assert torch.allclose(under_peft(make_base("phi3"), tmp_path / "fixed"), wanted, atol=1e-5)


def test_megatron_rows_are_taken_group_by_group(spec: Spec, tmp_path: Path) -> None:
    """Megatron-Core keeps Q, K and V of each of the two groups together."""
    a, q_b, k_b, v_b = drawn(1, 4, HIDDEN), drawn(2, Q, 4), drawn(3, KV, 4), drawn(4, KV, 4)
    groups = [torch.cat([part.chunk(2)[g] for part in (q_b, k_b, v_b)]) for g in range(2)]
    prefix = "base_model.model.decoder.layers.1.self_attention.linear_qkv.adapter"
    made = write(
        tmp_path / "made",
        {
            f"{prefix}.linear_in.weight": a,
            f"{prefix}.linear_out.weight": torch.cat(groups),
        },
    )
    fixed = fix(read_adapter(made), spec("llama"), OPTIONS, tmp_path / "fixed")
    assert fixed.judgement.matched == 3
    parts = {"q_proj": q_b, "k_proj": k_b, "v_proj": v_b}
    wanted = added("llama", {f"{LAYER}.self_attn.{name}": 2 * b @ a for name, b in parts.items()})
    assert torch.allclose(under_peft(make_base("llama"), tmp_path / "fixed"), wanted, atol=1e-5)


def test_mlx_matrices_are_turned_round(spec: Spec, tmp_path: Path) -> None:
    a, b = drawn(1, HIDDEN, 8), drawn(2, 8, Q)
    folder = tmp_path / "made"
    folder.mkdir()
    save_file(
        {f"{LAYER}.self_attn.q_proj.lora_a": a, f"{LAYER}.self_attn.q_proj.lora_b": b},
        folder / "adapters.safetensors",
    )
    parameters = {"rank": 8, "scale": 10.0, "dropout": 0.0}
    (folder / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "lora_parameters": parameters, "num_layers": 1})
    )
    fixed = fix(read_adapter(folder), spec("llama"), OPTIONS, tmp_path / "fixed")
    assert {change.change for change in fixed.changes} == {"turned round"}
    wanted = added("llama", {f"{LAYER}.self_attn.q_proj": 10 * (a @ b).T})
    assert torch.allclose(under_peft(make_base("llama"), tmp_path / "fixed"), wanted, atol=1e-5)


@pytest.mark.parametrize("init", ["pissa_niter_4", "LoftQ", "an init of next year"])
def test_inits_that_change_the_base_or_are_not_known_are_refused(
    init: str, spec: Spec, tmp_path: Path
) -> None:
    made = make_adapter("compiled", tmp_path)
    config = made / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "init_lora_weights": init}))
    with pytest.raises(FixRefused, match="changed the base weights"):
        fix(read_adapter(made), spec("llama"), OPTIONS, tmp_path / "fixed")


def test_torchtunes_own_layout_is_refused(spec: Spec, tmp_path: Path) -> None:
    """Its rows of Q and K stand in Meta's rotary order: renaming them would turn heads round."""
    name = "layers.0.attn.q_proj"
    made = write(
        tmp_path / "made",
        {f"{name}.lora_a.weight": drawn(1, 4, HIDDEN), f"{name}.lora_b.weight": drawn(2, Q, 4)},
    )
    with pytest.raises(FixRefused, match="torchtune"):
        fix(read_adapter(made), spec("llama"), OPTIONS, tmp_path / "fixed")


# --- scales --------------------------------------------------------------------------------------


@pytest.fixture
def plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that multiplies by lora_alpha/r of the configuration and reads nothing else."""

    def judge(adapter: Any, tree: Any, options: ServeOptions) -> EngineAnswer:
        scale = adapter.config.alpha / adapter.config.rank
        modules = tuple(
            ModuleVerdict(
                m.a.key.text,
                m.module,
                m.module,
                m.scale,
                scale,
                State.APPLIED
                if m.scale == pytest.approx(scale) and m.rank == adapter.config.rank
                else State.WRONG_SCALE,
                "another factor",
            )
            for m in adapter.modules
        )
        return EngineAnswer(modules, "source", "this test", "1")

    monkeypatch.setitem(
        sys.modules, "ullage.adapters.engines.plain_engine", SimpleNamespace(judge=judge)
    )
    monkeypatch.setitem(ENGINES, "vllm", Engine("vllm", "plain_engine", ("0.32",)))


@pytest.mark.parametrize("name", ["rslora", "patterns", "rslora patterns"])
@pytest.mark.usefixtures("plain_engine")
def test_scales_are_folded_into_b_where_the_engine_reads_one_number(
    name: str, spec: Spec, tmp_path: Path
) -> None:
    adapter = read_adapter(make_adapter(name, tmp_path))
    fixed = fix(adapter, spec("llama"), OPTIONS, tmp_path / "fixed")
    config = json.loads((tmp_path / "fixed" / "adapter_config.json").read_text())
    assert not config["use_rslora"]
    assert not config["rank_pattern"]
    trained = logits(make_model(name))
    assert torch.allclose(under_peft(make_base("llama"), tmp_path / "fixed"), trained, atol=1e-5)
    assert fixed.notes or name == "rslora"


@pytest.mark.usefixtures("plain_engine")
def test_half_precision_is_kept_unless_a_product_needs_more(spec: Spec, tmp_path: Path) -> None:
    made = make_adapter("patterns", tmp_path)
    weights = made / "adapter_model.safetensors"
    tensors = {key: value.bfloat16() for key, value in load_file(weights).items()}
    save_file(tensors, weights)
    fix(read_adapter(made), spec("llama"), OPTIONS, tmp_path / "fixed")
    written = load_file(tmp_path / "fixed" / "adapter_model.safetensors")
    kinds = {key.rpartition(".lora_")[2][0]: value.dtype for key, value in written.items()}
    assert kinds["A"] == torch.bfloat16
    old, new = read_adapter(made), read_adapter(tmp_path / "fixed")
    for before, after in zip(old.modules, new.modules, strict=True):
        assert before.module == after.module
        delta = [
            m.scale * tensors_b.float() @ tensors_a.float()
            for m, tensors_a, tensors_b in (
                (before, tensors[before.a.key.text], tensors[before.b.key.text]),
                (after, written[after.a.key.text], written[after.b.key.text]),
            )
        ]
        assert torch.allclose(delta[0], delta[1], rtol=1e-6, atol=1e-7)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_writes_a_map_of_old_to_new(
    base_dir: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_adapter("compiled", tmp_path)
    save = tmp_path / "deep" / "fixed"
    argv = ["adapter", "fix", str(made), "--base", str(base_dir("llama")), "--save", str(save)]
    assert main([*argv, "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "works"
    first = document["tensors"][0]
    assert "_orig_mod" in first["from"][0]
    assert "_orig_mod" not in first["to"]
    assert json.loads((save / "ullage_fix.json").read_text())["tensors"] == document["tensors"]
    assert {path.name for path in save.iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors", "ullage_fix.json")
    }
    assert main(argv) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = read_adapter(make_adapter("compiled", tmp_path / "made"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ullage.adapters.rewriting.fix.fill", full)
    with pytest.raises(BadUsage, match="No space left"):
        fix(adapter, spec("llama"), OPTIONS, tmp_path / "fixed")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_an_untrained_adapter_is_fixed_and_still_told_to_be_untrained(
    spec: Spec, tmp_path: Path
) -> None:
    """Verdicts and repairs are of names and shapes; that B is zero is a rule's to say (L050)."""
    made = make_adapter("compiled", tmp_path)
    weights = made / "adapter_model.safetensors"
    zero = {k: v if "lora_A" in k else v * 0 + 0 for k, v in load_file(weights).items()}
    save_file(zero, weights)
    fixed = fix(read_adapter(made), spec("llama"), OPTIONS, tmp_path / "fixed")
    assert fixed.judgement.verdict == "works"
    fired = {f.id for f in fixed.judgement.findings if f.state == "fired"}
    assert "L050" in fired


def test_a_rank_above_the_limit_is_the_engines_to_refuse(spec: Spec, tmp_path: Path) -> None:
    adapter = read_adapter(make_adapter("rank 32", tmp_path))
    with pytest.raises(FixRefused, match="greater than max_lora_rank 16"):
        fix(adapter, spec("llama"), replace(OPTIONS, max_lora_rank=16), tmp_path / "fixed")


def test_fixing_twice_changes_nothing(spec: Spec, tmp_path: Path) -> None:
    once: Fixed = fix(
        read_adapter(make_adapter("fsdp", tmp_path)), spec("llama"), OPTIONS, tmp_path / "once"
    )
    assert {change.change for change in once.changes} == {"renamed"}
    twice = fix(read_adapter(tmp_path / "once"), spec("llama"), OPTIONS, tmp_path / "twice")
    assert {change.change for change in twice.changes} == {"copied"}
    names = ("adapter_config.json", "adapter_model.safetensors")
    for name in names:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()

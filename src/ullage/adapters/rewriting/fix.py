"""An adapter rewritten to what an engine reads: same ΔW for every module, other names and shapes.

Holds the search for a way of writing that the engine's own judge calls whole, and the atomic
writing. Where modules belong is `placing.py`, arithmetic `pairs.py`, bytes `values.py`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ullage.adapters.base import BaseTree, base_tree
from ullage.adapters.check import check
from ullage.adapters.effect import meant_scale
from ullage.adapters.engines.table import resolve
from ullage.adapters.rewriting.pairs import NewPair, copied, rescaled
from ullage.adapters.rewriting.placing import FixRefused, Placed, is_whole, place_all
from ullage.adapters.rewriting.values import Made, fill, write_hole
from ullage.adapters.verdict import Judgement, ServeOptions, verdict_of
from ullage.anatomy.adapters.adapter import Adapter, AdapterConfig, AdapterModule
from ullage.anatomy.adapters.read import read_adapter
from ullage.anatomy.adapters.scale import changes_base
from ullage.anatomy.spec import ModelSpec
from ullage.errors import BadUsage

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MAP = "ullage_fix.json"

# Trees in which a wrapper's language model is trained and served, beside its own checkpoint's.
_ROOTS = ("model", "language_model.model", "model.language_model", "language_model")
_SAME = 1e-6  # the relative error of a scale that float64 arithmetic may leave


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor of the new file: what it is made from, and how."""

    to: str
    sources: tuple[str, ...]
    change: str


@dataclass(frozen=True, slots=True)
class Fixed:
    """What was written, and the judgement on it."""

    directory: str
    changes: tuple[Change, ...]
    judgement: Judgement
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Draft:
    """One way to write the adapter: pairs by their final names, whole modules, configuration."""

    pairs: tuple[NewPair, ...]
    whole: tuple[AdapterModule, ...]
    config: Mapping[str, object]

    def tensors(self) -> list[Made]:
        """All that is to be written, in its order."""
        saved = [
            copied(tensor, f"{PREFIX}{module.module}.{tensor.key.parameter}")
            for module in self.whole
            for tensor in module.tensors
        ]
        return [made for pair in self.pairs for made in pair.written(PREFIX)] + saved

    def ways(self) -> Iterator[str]:
        """What was done to each of `tensors()`."""
        for pair in self.pairs:
            yield from [pair.change] * (2 + len(pair.copies))
        for module in self.whole:
            yield from ["renamed"] * len(module.tensors)


def fix(adapter: Adapter, spec: ModelSpec, options: ServeOptions, save: Path) -> Fixed:
    """Rewrite `adapter` into the new directory `save`; the original is only read.

    Raises:
        FixRefused: it cannot be done with certainty; nothing is left behind.
        BadUsage: `save` is there already.
    """
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise BadUsage("is there already", file=save, expected="a new or empty directory")
    if save.resolve().is_relative_to(Path(adapter.path).resolve()):
        raise BadUsage("lies inside the adapter", file=save, expected="a directory beside it")
    _require_plain(adapter)
    tree = base_tree(spec)
    placed = place_all(adapter.modules, tree, adapter.path)
    staged = save.parent / f".{save.name}.{os.getpid()}.tmp"
    try:
        save.parent.mkdir(parents=True, exist_ok=True)
        staged.mkdir()
        fixed = _write(adapter, placed, tree, spec, options, staged, save)
        staged.rename(save)
    except OSError as error:
        raise BadUsage(f"cannot be written: {error.strerror}", file=save) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return fixed


def _require_plain(adapter: Adapter) -> None:
    """Refuse what has no ΔW = scale·B·A, or is not all there."""
    config, found = adapter.config, None
    if config.peft_type != "LORA":
        found = f"an adapter of type {config.peft_type}"
    elif adapter.from_pickle:
        found = "a pickle, which is never loaded"
    elif adapter.missing_files:
        found = f"{adapter.missing_files[0]} is missing"
    elif config.use_dora or config.variants:
        found = f"{', '.join(config.variants) or 'DoRA'} is more than base + scale·B·A"
    elif config.bias != "none" or config.lora_bias:
        found = "biases were trained too"
    elif config.layer_replication:
        found = "layer_replication changes the base model"
    elif config.writer == "torchtune" and any(t.key.parameter == "lora_a" for t in adapter.tensors):
        found = "torchtune's own layout, whose rotary rows stand in another order"
    elif changes_base(config.init_lora_weights):
        found = f"init_lora_weights={config.init_lora_weights!r} changed the base weights"
    elif not any(module.a or module.b for module in adapter.modules):
        found = "no pair of matrices"
    else:
        found = _uncertain_scale(adapter)
    if found is not None:
        raise FixRefused(found, file=adapter.path, expected="a plain LoRA adapter in safetensors")


def _uncertain_scale(adapter: Adapter) -> str | None:
    """Why nobody can say which scale was trained: the configuration was changed afterwards.

    PEFT fills in an alpha that is not there (8), and fails at one that is null.
    """
    if adapter.config.alpha is None and "lora_alpha" in (adapter.config.raw or {}):
        return "lora_alpha null"
    for module in adapter.modules:
        if meant_scale(module) != module.scale:
            return (
                f"rank {module.rank_declared} in the configuration and {module.rank} in the "
                f"tensors of {module.module}"
            )
    return None


def _write(
    adapter: Adapter,
    placed: Sequence[Placed],
    tree: BaseTree,
    spec: ModelSpec,
    options: ServeOptions,
    staged: Path,
    save: Path,
) -> Fixed:
    """The first draft that the engine takes whole, filled with its values."""
    best: str | None = None
    engine, resolved = resolve(options)
    judge = engine.judge()
    for draft in _drafts(adapter, placed, tree):
        tensors = draft.tensors()
        (staged / CONFIG).write_text(json.dumps(draft.config, indent=2) + "\n", encoding="utf-8")
        write_hole(staged / WEIGHTS, tensors)
        written = read_adapter(staged)
        if not _means_the_same(written, draft.pairs):
            continue
        answer = judge(written, tree, resolved)
        verdict = verdict_of(answer)
        if verdict == "works":
            fill(staged / WEIGHTS, tensors)
            judgement = check(read_adapter(staged), spec, options)
            if judgement.verdict != "works":
                raise FixRefused(
                    next((m.detail for m in judgement.modules if m.detail), judgement.verdict),
                    file=adapter.path,
                )
            changes = tuple(map(_change, tensors, draft.ways()))
            notes = _notes(adapter, draft)
            _write_map(staged / MAP, adapter, judgement, changes, notes)
            return Fixed(str(save), changes, judgement, notes)
        reason = answer.message or next((m.detail for m in answer.modules if m.detail), verdict)
        # The checkpoint's own names come first, and what is said of them is the clearest.
        best = best or _without(reason, staged, save)
    raise FixRefused(f"no way of writing it works on {options.engine}: {best}", file=adapter.path)


def _without(reason: str, staged: Path, save: Path) -> str:
    """What is said of the staged directory, said of the one that was asked for."""
    return reason.replace(str(staged.absolute()), str(save)).replace(str(staged), str(save))


# --- drafts --------------------------------------------------------------------------------------


def _drafts(adapter: Adapter, placed: Sequence[Placed], tree: BaseTree) -> Iterator[_Draft]:
    """Ways to write the adapter, those that change least first."""
    seen: set[tuple[str, ...]] = set()
    for rename in _renamings(tree.root):
        pairs = [replace(one.pair, module=rename(one)) for one in placed]
        names = tuple(pair.module for pair in pairs)
        if names in seen:
            continue
        seen.add(names)
        for scale in (_as_it_was, _by_pattern, _uniform):
            draft = scale(adapter, pairs)
            if draft is not None:
                yield draft


def _renamings(root: str) -> Iterator[Callable[[Placed], str]]:
    yield lambda one: one.pair.module
    yield lambda one: one.trained or one.pair.module
    for other in _ROOTS:

        def under(one: Placed, other: str = other) -> str:
            path = one.pair.module
            if path.startswith(root + "."):
                return f"{other}.{path[len(root) + 1 :]}"
            if path.rpartition(".")[2] == "lm_head":
                outer, _, inner = other.rpartition(".")
                return f"{outer}.lm_head" if inner == "model" and outer else "lm_head"
            return path

        yield under


def _as_it_was(adapter: Adapter, pairs: Sequence[NewPair]) -> _Draft | None:
    """The configuration as trained, where it is PEFT's."""
    config = adapter.config
    if config.rank is None or config.writer.startswith(("mlx", "megatron")):
        return None
    return _Draft(tuple(pairs), _whole(adapter), _config(config, pairs, {}))


def _by_pattern(adapter: Adapter, pairs: Sequence[NewPair]) -> _Draft:
    """Rank and alpha of most modules for all, the others by patterns of their full names."""
    ranks = {pair.module: _declared_rank(pair, adapter.config) for pair in pairs}
    alphas = {pair.module: _number(pair.scale * ranks[pair.module]) for pair in pairs}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    values = {
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": False,
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {name: a for name, a in alphas.items() if a != alpha},
    }
    return _Draft(tuple(pairs), _whole(adapter), _config(adapter.config, pairs, values))


def _uniform(adapter: Adapter, pairs: Sequence[NewPair]) -> _Draft | None:
    """One rank and one scale for all, for engines that read no more: zeros and factors in B."""
    if any("base_layer" in pair.layout[0] for pair in pairs):
        return None
    rank = max(pair.rank for pair in pairs)
    scale = Counter(pair.scale for pair in pairs).most_common(1)[0][0]
    same = tuple(rescaled(pair, rank, scale) for pair in pairs)
    values: dict[str, object] = {
        "r": rank,
        "lora_alpha": _number(scale * rank),
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return _Draft(same, _whole(adapter), _config(adapter.config, same, values))


def _whole(adapter: Adapter) -> tuple[AdapterModule, ...]:
    return tuple(module for module in adapter.modules if is_whole(module))


def _declared_rank(pair: NewPair, config: AdapterConfig) -> int:
    """The rank of one expert where the pair holds a stack of them."""
    if ".experts" in pair.module and "base_layer" in pair.layout[0] and config.rank:
        return config.rank
    return pair.rank


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _config(
    config: AdapterConfig, pairs: Sequence[NewPair], values: Mapping[str, object]
) -> dict[str, object]:
    """adapter_config.json with `values` in it, naming the leaves of the modules that are there."""
    leaves = sorted({pair.module.rpartition(".")[2] for pair in pairs})
    keep = dict(config.raw or {})
    if config.writer.startswith(("mlx", "megatron")):
        base = {"base_model_name_or_path": config.base_model, "task_type": config.task_type}
        keep = {key: value for key, value in base.items() if value is not None}
    keep |= {"peft_type": "LORA", "bias": "none", "inference_mode": True, **values}
    if config.target_parameters:
        return keep
    # Names of modules as they are now; patterns over the old ones would miss them.
    keep["target_modules"] = leaves
    keep.pop("exclude_modules", None)
    return keep


def _means_the_same(written: Adapter, pairs: Sequence[NewPair]) -> bool:
    """Whether the new configuration gives every module the scale that its values are made for."""
    wanted: dict[str, float] = {}
    for pair in pairs:
        wanted[pair.written(PREFIX)[0].name] = pair.scale
    found = {m.a.key.text: m.scale for m in written.modules if m.a is not None}
    return set(found) == set(wanted) and all(
        (scale := found[name]) is not None and abs(scale - value) <= _SAME * abs(value)
        for name, value in wanted.items()
    )


# --- what is said of it --------------------------------------------------------------------------


def _change(tensor: Made, way: str) -> Change:
    same = tensor.sources == (tensor.name,) and way == "renamed"
    return Change(tensor.name, tensor.sources, "copied" if same else way)


def _notes(adapter: Adapter, draft: _Draft) -> tuple[str, ...]:
    notes = []
    factors = {block.factor for pair in draft.pairs for block in pair.blocks} - {1.0}
    if factors:
        said = ", ".join(f"{factor:.6g}" for factor in sorted(factors)[:4])
        notes.append(f"B was multiplied by {said} and is stored in float32")
    if (rank := draft.config["r"]) != adapter.config.rank:
        notes.append(f"the rank is {rank} (was {adapter.config.rank})")
    if adapter.unused_files:
        notes.append(f"not read: {', '.join(adapter.unused_files[:4])}")
    return tuple(notes)


def _write_map(
    file: Path,
    adapter: Adapter,
    judgement: Judgement,
    changes: Sequence[Change],
    notes: Sequence[str],
) -> None:
    document = {
        "original": adapter.path,
        "engine": judgement.engine,
        "version": judgement.version,
        "notes": list(notes),
        "tensors": [{"to": c.to, "from": list(c.sources), "change": c.change} for c in changes],
    }
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

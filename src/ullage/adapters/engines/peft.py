"""What PEFT 0.21 makes of an adapter (`PeftModel.from_pretrained`, transformers 5.24): `judge`.

Holds where its layers go, which stored keys reach them and what stops loading. Which modules the
configuration targets is `peft_targets.py`; the module tree is `peft_tree.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ullage.adapters.base import BaseModule, BaseTree
from ullage.adapters.effect import meant_scale
from ullage.adapters.engines.peft_targets import Refused, Targets, targets_of
from ullage.adapters.engines.peft_tree import Place, TrainedTree, trained_tree
from ullage.adapters.verdict import EngineAnswer, ModuleVerdict, ServeOptions, State
from ullage.anatomy.adapters.adapter import (
    Adapter,
    AdapterKey,
    AdapterModule,
    AdapterTensor,
    Matrix,
)

SOURCE = (
    "peft 0.21.2: peft_model.py, utils/save_and_load.py, utils/transformers_weight_conversion.py, "
    "tuners/tuners_utils.py, tuners/lora/; transformers 5.24"
)
VERSION = "0.21"
ADAPTER_NAME = "default"
"""What `PeftModel.from_pretrained` calls the adapter."""

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# peft_model.py: the class is chosen by task_type (MODEL_TYPE_TO_PEFT_MODEL_MAPPING).
_CLASSES = {
    "SEQ_CLS": "PeftModelForSequenceClassification", "SEQ_2_SEQ_LM": "PeftModelForSeq2SeqLM",
    "CAUSAL_LM": "PeftModelForCausalLM", "TOKEN_CLS": "PeftModelForTokenClassification",
    "QUESTION_ANS": "PeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "PeftModelForFeatureExtraction",
}  # fmt: skip
_PROMPTS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT",
            "CARTRIDGE")  # fmt: skip
# What stands inside the paths of PEFT's own state.
_INNER = ("base_layer", "token_adapter")
_LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
_PAIR = (Matrix.A, Matrix.B, Matrix.EMBEDDING_A, Matrix.EMBEDDING_B)


def judge(adapter: Adapter, tree: BaseTree, options: ServeOptions) -> EngineAnswer:
    """What becomes of every module of `adapter` in PeftModel.from_pretrained on this base model.

    There are no slots and no limits. Raises MalformedConfig for a pattern that cannot be evaluated.
    """
    trained = trained_tree(tree)
    counted = [
        module
        for module in adapter.modules
        if any(t.key.matrix is not Matrix.BASE for t in module.tensors)
    ]
    notes = () if trained.known else (
        f"{tree.spec.architecture} was not recorded from transformers: its modules are taken to "
        "have the names of the checkpoint",
    )  # fmt: skip
    message: str | None = None
    unsure = "whether its block-diagonal patterns match" if adapter.config.use_bdlora else None
    doubt = next((d for m in counted if (d := trained.doubt(m.module)) is not None), None)
    try:
        _find_files(adapter)
        unsure = unsure or doubt
        targets = targets_of(adapter, trained)
        modules = _Loading(adapter, trained, targets).verdicts(counted)
    except Refused as refusal:
        message = str(refusal)
        modules = tuple(_verdict(module, None, State.REFUSED, detail=message) for module in counted)
        if doubt is not None and unsure is not None and "not found in the base" in message:
            message = None  # a target that the record does not show may be there
    return EngineAnswer(
        modules=modules,
        basis="verified" if trained.known and doubt is None else "source",
        source=SOURCE,
        version=options.version or VERSION,
        message=message,
        unsure=unsure,
        slot_bytes=None,
        notes=notes,
    )


def _find_files(adapter: Adapter) -> None:
    """config.py, _get_peft_type; utils/save_and_load.py, load_peft_weights."""
    folder = str(Path(adapter.path))
    if Path(adapter.config.file or "").name != "adapter_config.json":
        raise Refused(f"Can't find 'adapter_config.json' at '{folder}'")
    raw = adapter.config.raw or {}
    if "peft_type" not in raw:
        raise Refused("'peft_type'")
    if not {Path(file).name for file in adapter.files} & set(_WEIGHTS):
        # A path is no name on a hub, where it looks next.
        raise Refused(
            "Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
            f"'{folder}'. Use `repo_type` argument if needed."
        )
    if adapter.config.peft_type == "LORA":
        _require_numbers(raw)
        if str(adapter.config.init_lora_weights).lower() == "corda":
            raise Refused("`eigens` attribute not found for layer, please run `preprocess_corda`")
    if adapter.config.peft_type == "ADALORA" and not raw.get("total_step"):
        raise Refused("AdaLoRA does not work when `total_step` is None, supply a value > 0.")


def _require_numbers(raw: Mapping[str, object]) -> None:
    """tuners/lora/layer.py, update_layer."""
    rank, alpha = raw.get("r", 8), raw.get("lora_alpha", 8)
    if not isinstance(rank, int | float):
        kind = type(rank).__name__
        raise Refused(f"'<=' not supported between instances of '{kind}' and 'int'")
    if rank <= 0:
        raise Refused(f"`r` should be a positive integer value but the value passed is {rank}")
    if not isinstance(alpha, int | float):
        kind = "float" if raw.get("use_rslora") else "int"
        raise Refused(f"unsupported operand type(s) for /: '{type(alpha).__name__}' and '{kind}'")


def _verdict(
    module: AdapterModule, target: str | None, state: State, applied: float | None = None,
    detail: str = "",
) -> ModuleVerdict:  # fmt: skip
    tensor = module.a or module.tensors[0]
    meant = meant_scale(module)
    return ModuleVerdict(tensor.key.text, module.module, target, meant, applied, state, detail)


@dataclass(slots=True)
class _Loading:
    """One adapter on its way into one tree."""

    adapter: Adapter
    tree: TrainedTree
    targets: Targets

    def verdicts(self, modules: list[AdapterModule]) -> tuple[ModuleVerdict, ...]:
        """Every module's verdict. Raises Refused for what stops loading: full modules that are not
        there, then tensors of another size."""
        self._require_saved()
        self._require_base_sizes()
        self._require_whole_mixtures(modules)
        found = [self._one(module) for module in modules]
        last: dict[tuple[str, Matrix], int] = {}
        for number, verdict in enumerate(found):
            if verdict.target is None or verdict.state is not State.APPLIED:
                continue
            place = (verdict.target, modules[number].tensors[0].key.matrix)
            if place in last and self.tree.merged(self._path(modules[number]) or "") is None:
                detail = f"another module of the adapter is loaded into {verdict.target} after it"
                before = last[place]
                found[before] = _verdict(
                    modules[before], verdict.target, State.DOUBLED, detail=detail
                )
            last[place] = number
        return tuple(found)

    def _one(self, module: AdapterModule) -> ModuleVerdict:
        if self.adapter.config.peft_type in _PROMPTS:
            return _verdict(module, "", State.APPLIED)
        path = self._path(module)
        if path is None:
            return _verdict(module, None, State.UNMAPPED, detail=self._foreign(module))
        if not path:  # tensors that all layers share
            return _verdict(module, path, State.APPLIED)
        pair = [t for t in module.tensors if t.key.matrix in _PAIR]
        if not pair and all(t.key.matrix is Matrix.SAVED for t in module.tensors):
            return self._saved(module, path)
        if self.adapter.config.peft_type != "LORA" or not pair:
            return self._other(module, path)
        merged = self.tree.merged(path)
        if merged is not None and self.tree.find(path) is None:
            return self._merged(module, *merged)
        return self._pair(module, path)

    # --- names -----------------------------------------------------------------------------------

    def _path(self, module: AdapterModule) -> str | None:
        """Where the module's first tensor leads in the tree, None where PEFT knows no such key."""
        key = (module.a or module.tensors[0]).key
        words = [word for word in key.wrappers if word not in _INNER]
        lora = self.adapter.config.peft_type == "LORA"
        converts = self.tree.record.converted and lora and key.matrix in _PAIR
        if words == ["base_model"] and not key.module:
            return ""
        if words != ["base_model", "model"] and not (converts and not words):
            return None
        if key.adapter_name not in (None, ADAPTER_NAME) or not self._is_peft(key):
            return None
        prefix = "base_model.model." if words else ""
        return self.tree.renamed(key.module, prefix) if converts else key.module

    def _is_peft(self, key: AdapterKey) -> bool:
        """Whether the parameter has PEFT's own name (other writers have others)."""
        if key.matrix not in (*_PAIR, Matrix.MAGNITUDE):
            return True
        whole = key.matrix not in (Matrix.A, Matrix.B) or key.text.endswith(".weight")
        return key.parameter in _LORA and (whole or self.adapter.config.peft_type != "LORA")

    def _foreign(self, module: AdapterModule) -> str:
        key = (module.a or module.tensors[0]).key
        if not self._is_peft(key):
            return f"PEFT has no parameter {key.text.rpartition('.')[2]}"
        if key.adapter_name not in (None, ADAPTER_NAME):
            return f"the keys name the adapter {key.adapter_name}, and it is loaded as default"
        if not key.wrappers:
            return "the key does not begin with base_model.model., so that nothing has its name"
        return f"no key of PEFT's has {'.'.join(key.wrappers)} in it, so that nothing has its name"

    # --- kinds of modules ------------------------------------------------------------------------

    def _saved(self, module: AdapterModule, path: str) -> ModuleVerdict:
        """Full weights and biases; those that no wrapper holds replace the base's own."""
        place = self.tree.find(path)
        if place is None:
            return _verdict(module, None, State.UNMAPPED, detail=f"the model has no module {path}")
        stored_inside = any("base_layer" in t.key.wrappers for t in module.tensors)
        if self.targets.takes(path) and not stored_inside:
            detail = "a LoRA layer stands there, which has the weight under another name"
            return _verdict(module, path, State.IGNORED, detail=detail)
        for tensor in module.tensors:
            sides = _weight_sides(place.base)
            if tensor.key.parameter == "weight" and sides and tensor.shape != sides:
                self._refuse_size(tensor, tensor.key.text, tensor.shape, sides)
        return _verdict(module, path, State.APPLIED)

    def _other(self, module: AdapterModule, path: str) -> ModuleVerdict:
        """Other methods' parameters, and the rows of single tokens: their sizes are not looked
        at."""
        if self.tree.find(path) is None:
            return _verdict(module, None, State.UNMAPPED, detail=f"the model has no module {path}")
        tokens = module.tensors[0].key.matrix is Matrix.TOKENS
        if not tokens and not self.targets.takes(path):
            return _verdict(module, path, State.IGNORED, detail=self.targets.why_not(path))
        return _verdict(module, path, State.APPLIED)

    def _merged(self, module: AdapterModule, owner: str, parameter: str) -> ModuleVerdict:
        """A single expert's module, which becomes a part of a stacked parameter's."""
        target = f"{owner}.{parameter}"
        if not self.targets.takes_parameter(target):
            detail = f"it would become a part of {target}, which has no LoRA layer"
            return _verdict(module, None, State.UNMAPPED, detail=detail)
        scale = module.scale
        if scale is not None and parameter == "gate_up_proj" and self.adapter.config.use_rslora:
            # Rank and alpha are both doubled, so that alpha/√rank is not what it was.
            scale = scale * math.sqrt(2)
        return self._scaled(module, target, scale)

    def _pair(self, module: AdapterModule, path: str) -> ModuleVerdict:
        owner, _, parameter = path.rpartition(".")
        place = self.tree.find(path)
        stack = self.tree.find(owner) if place is None else None
        if stack is not None and parameter in stack.parameters:
            if not self.targets.takes_parameter(path):
                return _verdict(module, path, State.IGNORED, detail=self.targets.why_not(path))
            self._require_sizes(module, path, self.tree.parameter(owner, parameter))
        elif place is None:
            return _verdict(module, None, State.UNMAPPED, detail=f"the model has no module {path}")
        elif place.kind == "experts":
            return self._stacked(module, place)
        elif place.kind == "plain":
            if not self.targets.takes_parameter(f"{path}.weight"):
                return _verdict(module, path, State.IGNORED, detail=self.targets.why_not(path))
            self._require_sizes(module, path, place.base)
        else:
            if not self.targets.takes(path):
                return _verdict(module, path, State.IGNORED, detail=self.targets.why_not(path))
            if (place.kind == "embedding") is not _is_embedding(module):
                detail = "its matrices are not of the kind that this module's LoRA layer has"
                return _verdict(module, path, State.UNMAPPED, detail=detail)
            self._require_sizes(module, path, place.base)
        if module.b is None:
            detail = "it has no B, which then stays zero"
            return _verdict(module, path, State.IGNORED, detail=detail)
        if module.a is None:
            detail = "it has no A, so that PEFT's own random one is used with this B"
            return _verdict(module, path, State.SHAPE_MISMATCH, module.scale, detail)
        return self._scaled(module, path, module.scale)

    def _stacked(self, module: AdapterModule, place: Place) -> ModuleVerdict:
        """Experts whose parameter the names do not tell: wrappers lie around one another in the
        order in which the parameters are defined (tuners_utils.py, _inject_parameters)."""
        names = [n for n in place.parameters if self.targets.takes_parameter(f"{place.path}.{n}")]
        key = (module.a or module.tensors[0]).key
        number = len(names) - 1 - key.wrappers.count("base_layer")
        if not 0 <= number < len(names):
            detail = self.targets.why_not(place.path)
            return _verdict(module, place.path, State.IGNORED, detail=detail)
        path = f"{place.path}.{names[number]}"
        self._require_sizes(module, path, self.tree.parameter(place.path, names[number]))
        return self._scaled(module, path, module.scale)

    def _scaled(self, module: AdapterModule, path: str, scale: float | None) -> ModuleVerdict:
        meant = meant_scale(module)
        if meant is None or scale is None or abs(meant - scale) <= 1e-6 * abs(meant):
            return _verdict(module, path, State.APPLIED, scale)
        detail = f"applied at {scale:g} where training meant {meant:g}"
        return _verdict(module, path, State.WRONG_SCALE, scale, detail)

    # --- what stops loading ----------------------------------------------------------------------

    def _require_saved(self) -> None:
        """utils/save_and_load.py: a module to save that the file does not hold is a KeyError."""
        stored = {tensor.key.text for tensor in self.adapter.tensors}
        for path in self.targets.saved_paths():
            key = f"base_model.model.{path}.weight"
            if key not in stored:
                raise Refused(f"'{key}'")

    def _require_base_sizes(self) -> None:
        """Copies of the base's weights (save_embedding_layers) are loaded too."""
        for module in self.adapter.modules:
            for tensor in module.saved:
                path = tensor.key.module
                if tensor.key.matrix is not Matrix.BASE or not self.targets.takes(path):
                    continue
                place = self.tree.find(path)
                sides = _weight_sides(place.base) if place is not None else None
                if sides is not None and tensor.shape != sides:
                    self._refuse_size(tensor, tensor.key.text, tensor.shape, sides)

    def _require_whole_mixtures(self, modules: list[AdapterModule]) -> None:
        """Single experts' matrices are put together; an expert that is not there is missing in the
        sum."""
        counts: dict[tuple[str, str], int] = {}
        first: dict[tuple[str, str], AdapterModule] = {}
        for module in modules:
            merged = self.tree.merged(self._path(module) or "")
            if merged is None or module.a is None or self.tree.find(module.module) is not None:
                continue
            counts[merged] = counts.get(merged, 0) + 1
            first.setdefault(merged, module)
        for (owner, parameter), count in counts.items():
            base = self.tree.parameter(owner, parameter)
            rows = first[owner, parameter].rank_declared
            if base is None or rows is None:
                continue
            parts = 2 if parameter == "gate_up_proj" else 1
            given, expected = count * rows, base.num_experts * parts * rows
            if given != expected and self.targets.takes_parameter(f"{owner}.{parameter}"):
                inner = ".base_layer" if parameter == "gate_up_proj" else ""
                tensor = first[owner, parameter].a
                assert tensor is not None
                self._refuse_size(
                    tensor, f"base_model.model.{owner}{inner}.lora_A.weight",
                    (given, base.in_features), (expected, base.in_features),
                )  # fmt: skip

    def _require_sizes(self, module: AdapterModule, path: str, base: BaseModule | None) -> None:
        """torch's load_state_dict takes no tensor of another shape."""
        rank = module.rank_declared
        if base is None or rank is None or module.transposed or _has_other_layout(self.adapter):
            return
        rows = rank
        if base.num_experts and self.tree.find(path) is None:
            rows = rank * base.num_experts
        for tensor, expected in (
            (module.a, (rows, base.in_features)),
            (module.b, (base.out_features, rows)),
        ):
            if tensor is not None and tensor.shape != expected:
                self._refuse_size(tensor, tensor.key.text, tensor.shape, expected)

    def _refuse_size(
        self, tensor: AdapterTensor, text: str, given: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        kind = _CLASSES.get(self.adapter.config.task_type or "", "PeftModel")
        raise Refused(
            f"Error(s) in loading state_dict for {kind}:\n\tsize mismatch for "
            f"{_loaded_name(tensor, text)}: copying a param with shape "
            f"torch.Size({list(given)}) from checkpoint, the shape in current model is "
            f"torch.Size({list(expected)})."
        )


def _loaded_name(tensor: AdapterTensor, text: str) -> str:
    """The key with the adapter's name in it, as it stands in the model."""
    if tensor.key.adapter_name is not None or not tensor.key.parameter.startswith("lora_"):
        return text
    parameter = f".{tensor.key.parameter}"
    return text.replace(parameter, f"{parameter}.{ADAPTER_NAME}", 1)


def _is_embedding(module: AdapterModule) -> bool:
    embeds = (Matrix.EMBEDDING_A, Matrix.EMBEDDING_B)
    return any(tensor.key.matrix in embeds for tensor in module.tensors)


def _has_other_layout(adapter: Adapter) -> bool:
    """Whether its matrices are of other sizes than [rank, in] and [out, rank]."""
    config = adapter.config
    return config.use_qalora or config.use_bdlora


def _weight_sides(base: BaseModule | None) -> tuple[int, int] | None:
    """The shape of the whole weight as the library holds it."""
    if base is None or base.num_experts:
        return None
    if base.kind in ("embedding", "conv1d"):
        return base.in_features, base.out_features
    return base.out_features, base.in_features

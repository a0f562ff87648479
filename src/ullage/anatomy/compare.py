"""What a checkpoint's headers hold against what its spec predicts: `compare`.

Holds the comparison of names, shapes and storage types, as data; verdicts are the audit's. Names
come from `tensors/expected.py`, storage types from `quantization/match.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ullage.anatomy.checkpoint import CheckpointIndex
from ullage.anatomy.files.safetensors import DTYPE_BITS
from ullage.anatomy.quantization.match import scheme_for
from ullage.anatomy.spec import ModelSpec, Unknown, WeightScheme
from ullage.anatomy.stored import (
    StoredGroup,
    aligned_prefix,
    name_pattern,
    stored_groups,
    without_common_end,
)
from ullage.anatomy.tensors.expected import ExpertLayout, expected_tensors
from ullage.anatomy.tensors.tensor import TensorSpec

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})

# Below this share of found names, the files follow another naming and nothing can be said.
MIN_SHARE_FOUND = 0.2

# Under which name, instead of `module.weight`, quantisers store a packed matrix.
_PACKED = (".qweight", ".weight_packed", "_blocks", ".weight_quantized", ".B")

# What quantisers store beside it: scales, zeros, orders, shapes, scales of activations and of KV.
_SIDE = (
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".weight_offset",
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".pre_quant_scale",
    ".activation_scale",
    ".output_scale",
    ".scale",
    ".scales",
    "_scale",
    "_scales",
    "_scale_inv",
    "_scale_2",
    "_input_scale",
    ".qzeros",
    ".g_idx",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_zero_point",
    ".v_zero_point",
    ".prob_output_scale",
    ".weight.absmax",
    ".weight.nested_absmax",
    ".weight.quant_map",
    ".weight.nested_quant_map",
    ".weight.quant_state.bitsandbytes__nf4",
    ".weight.quant_state.bitsandbytes__fp4",
    ".SCB",
    ".weight_format",
)

# Buffers that older exports stored and that every engine computes anew.
_BUFFERS = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "rope.freqs",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".position_ids",
)
_TOWER_WORDS = ("vis", "audio", "image", "mm_", "multi_modal", "projector", "connector", "aligner")
_HEADS = ("lm_head.weight", "embed_out.weight")
# What transformers puts on an encoder, or on a decoder that judges: saved with the model whatever
# the class that reads it later wants of it (BertForPreTraining's cls, …Classification's score).
_TASK_HEADS = ("pooler", "cls", "classifier", "pre_classifier", "score", "qa_outputs")
_JUDGES = ("Classification", "QuestionAnswering", "MultipleChoice", "RewardModel", "Prediction")


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor (with `{e}`: `count` of an expert's) that is not as the spec says."""

    name: str
    expected: str
    found: str
    count: int = 1
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Checkpoint against spec. Meaningless beyond `reason` when `comparable` is False.

    `matched` counts stored tensors that a prediction explains, `explained` (kind, tensors) those
    that a known custom explains: quantisation, buffers, tied head, task head, mtp, tower.
    `num_parameters` counts the elements of the predicted tensors that were found, unpacked;
    `tower_elements` what the vision and audio towers store.
    `mtp_stored` is None for a model without multi-token-prediction layers. `knows_storage` is
    False when the quantisation is not understood: storage types were then not compared.
    """

    comparable: bool
    reason: str | None = None
    matched: int = 0
    num_parameters: int = 0
    missing: tuple[Difference, ...] = ()
    unexpected: tuple[Difference, ...] = ()
    wrong_shape: tuple[Difference, ...] = ()
    wrong_dtype: tuple[Difference, ...] = ()
    explained: tuple[tuple[str, int], ...] = ()
    tower_elements: int = 0
    mtp_stored: bool | None = None
    knows_storage: bool = True

    @property
    def agrees(self) -> bool:
        """Whether everything was compared and nothing differs."""
        differs = self.missing or self.unexpected or self.wrong_shape or self.wrong_dtype
        return self.comparable and not differs


def compare(spec: ModelSpec, index: CheckpointIndex) -> Comparison:
    """Every predicted tensor looked up in the headers, every stored one explained or reported.

    Tensors in files that are not there are neither missing nor matched: `index` reports them.
    Not comparable, with the reason: no headers, names of the family or the GGUF architecture not
    known, or files that follow another naming.
    """
    reason = _why_not(spec, index)
    if reason is not None:
        return Comparison(False, reason)
    groups, strangers = stored_groups(index)
    # MTP layers whose names are not known are found by where they lie, behind the last layer.
    expected = [
        t
        for t in _in_stored_layout(spec, groups)
        if t.stack != "tower" and (t.named or t.stack != "mtp")
    ]
    if not all(tensor.named for tensor in expected):
        return Comparison(False, f"the tensor names of the family {spec.family} are not known")
    search = _Search(spec, index, groups, aligned_prefix(expected, groups))
    for tensor in expected:
        search.look_up(tensor)
    if search.found < MIN_SHARE_FOUND * len(expected):
        example = index.tensors[0].name if index.tensors else "none"
        return Comparison(
            False,
            f"the files follow another naming: {search.found} of {len(expected)} predicted names "
            f"were found, the first stored name is {example}",
        )
    search.explain_rest()
    search.unexpected += [Difference(name, "nothing", "a tensor") for name in strangers]
    return search.result()


def _in_stored_layout(spec: ModelSpec, groups: dict[str, StoredGroup]) -> list[TensorSpec]:
    """The predicted tensors, experts one by one or stacked as the files have them.

    Decided for the prediction layers apart: Qwen3.5 stacks its decoder's experts, not theirs.
    """
    usual = expected_tensors(spec)
    one_by_one = any(t.count > 1 and t.shard == "expert" for t in usual)
    tensors: list[TensorSpec] = []
    for mtp in (False, True):
        names = [name for name in groups if ("mtp." in name) == mtp and ".experts." in name]
        layout: ExpertLayout | None = None
        if any(".experts.{e}." in name for name in names):
            layout = "each"
        elif one_by_one and any(name.endswith(".experts.gate_up_proj") for name in names):
            layout = "stacked"
        laid_out = usual if layout is None else expected_tensors(spec, layout)
        tensors += [t for t in laid_out if (t.stack == "mtp") == mtp]
    return tensors


def _why_not(spec: ModelSpec, index: CheckpointIndex) -> str | None:
    if not index.has_headers:
        return "no header of the checkpoint could be read"
    if index.format == "gguf":
        from ullage.anatomy.gguf.names import ARCHITECTURES  # tables that only GGUF files need

        architecture = dict(index.metadata).get("general.architecture")
        if architecture not in ARCHITECTURES:
            return f"the tensor names of the GGUF architecture {architecture} are not known"
        if index.missing_files:
            return f"{len(index.missing_files)} parts of the GGUF model are not there"
    fields = [u.field for u in spec.unknowns if "weights" in u.widens and not _is_storage(u)]
    if fields:
        return f"the spec does not know what the weights are ({', '.join(fields)})"
    return None


def _is_storage(unknown: Unknown) -> bool:
    """Whether only the storage type is unknown, while names and shapes are not."""
    return unknown.field.startswith("quantization") or unknown.field.endswith("dtype")


def _is_pooler(name: str) -> bool:
    """Whether it is a bare encoder's pooler, which only some of its uses have."""
    return name.startswith("pooler.") or ".pooler." in name


def _text(tensor: TensorSpec) -> str:
    return f"{list(tensor.shape)}"


class _Search:
    """The state of one comparison: what was found so far, and what was not as predicted."""

    def __init__(
        self,
        spec: ModelSpec,
        index: CheckpointIndex,
        groups: dict[str, StoredGroup],
        prefixes: tuple[str, str],
    ) -> None:
        self.spec = spec
        self.groups = groups
        self.is_gguf = index.format == "gguf"
        self.knows_storage = not any(_is_storage(unknown) for unknown in spec.unknowns)
        self.layers_prefix = prefixes[1]
        self.predicted_prefix, self.stored_prefix = without_common_end(*prefixes)
        self.absent = Counter(name_pattern(name) for name, _ in index.absent_tensors)
        self.heads = [name for name in groups if name.endswith(_HEADS)]
        self.used: set[str] = set()
        self.places: set[str] = set()
        self.found = self.matched = self.num_parameters = self.tower_elements = 0
        self.mtp_found = False
        self.missing: list[Difference] = []
        self.missing_mtp: list[Difference] = []
        self.unexpected: list[Difference] = []
        self.wrong_shape: list[Difference] = []
        self.wrong_dtype: list[Difference] = []
        self.explained: Counter[str] = Counter()

    def look_up(self, tensor: TensorSpec) -> None:
        """Finds one predicted tensor under any of its names and compares it."""
        name, module = self.stored_name(tensor.name), self.stored_name(tensor.module)
        self.add_places(module)
        scheme = self.scheme(tensor)
        group = self.groups.get(name)
        packed = False
        if group is None and tensor.quantizable:
            group = next(
                (self.groups[module + s] for s in _PACKED if module + s in self.groups), None
            )
            packed = group is not None
        if group is None and tensor.role == "lm_head" and tensor.stack != "mtp" and self.heads:
            group = self.groups[self.heads[0]]
        if group is None:
            self.note_missing(tensor, name)
            return
        self.used.add(group.name)
        self.found += 1
        self.matched += group.count
        self.num_parameters += tensor.num_elements // tensor.count * group.count
        self.mtp_found = self.mtp_found or tensor.stack == "mtp"
        present = group.count + self.absent.get(group.name, 0)
        if present != tensor.count:
            self.missing.append(
                Difference(
                    name,
                    f"{tensor.count} experts",
                    f"{present} of them",
                    abs(tensor.count - present),
                    group.file,
                )
            )
        self.check_shape(tensor, group, scheme, packed)
        self.check_dtype(tensor, group, scheme)

    def stored_name(self, predicted: str) -> str:
        start = self.predicted_prefix
        if start != self.stored_prefix and predicted.startswith(start):
            return self.stored_prefix + predicted[len(start) :]
        return predicted

    def add_places(self, module: str) -> None:
        """Remembers a module and what contains it: where side tensors may lie."""
        while module and module not in self.places:
            self.places.add(module)
            module = module.rpartition(".")[0]

    def scheme(self, tensor: TensorSpec) -> WeightScheme | None:
        if self.is_gguf or not tensor.quantizable:
            return None
        return scheme_for(self.spec, tensor.module, tensor.role)

    def note_missing(self, tensor: TensorSpec, name: str) -> None:
        absent = self.absent.get(name, 0)
        if absent >= tensor.count:
            return
        if _is_pooler(name):  # left out with add_pooling_layer=False, and by GGUF's converter
            return
        shared = tensor.role in ("embed", "lm_head") and tensor.stack == "mtp"
        if shared:  # an MTP layer may leave out its copies of the main model's embedding and head
            return
        difference = Difference(name, _text(tensor), "nothing", tensor.count - absent)
        (self.missing_mtp if tensor.stack == "mtp" else self.missing).append(difference)

    def check_shape(
        self, tensor: TensorSpec, group: StoredGroup, scheme: WeightScheme | None, packed: bool
    ) -> None:
        """Shapes must be equal; packed and merged tensors must hold the right number of bits."""
        wanted = tensor.num_elements // tensor.count
        found_elements = group.num_elements // max(group.count, 1)
        compact = DTYPE_BITS.get(group.dtype, 0) <= 8 or packed
        if group.odd is not None:
            found = f"{list(group.shape or ())}, but {group.odd} differs"
        elif self.is_gguf:
            same = group.shape in (tensor.shape, tensor.shape[::-1]) or len(tensor.shape) != 2
            if (same or group.shape is None) and found_elements == wanted:
                return
            found = f"{list(group.shape or ())} ({found_elements} elements)"
        elif group.shape == tensor.shape or (compact and not self.knows_storage):
            return
        elif compact and scheme is not None:
            stored_bits = group.num_bytes * 8 // max(group.count, 1)
            if abs(stored_bits - wanted * scheme.bits) <= 0.05 * wanted * scheme.bits:
                return
            found = f"{stored_bits} bits where {scheme.name} takes {wanted * scheme.bits}"
        else:
            found = f"{list(group.shape or ())}"
        self.wrong_shape.append(
            Difference(group.name, _text(tensor), found, group.count, group.file)
        )

    def check_dtype(
        self, tensor: TensorSpec, group: StoredGroup, scheme: WeightScheme | None
    ) -> None:
        if self.is_gguf or not self.knows_storage:
            return
        if not tensor.quantizable or tensor.role == "hash_table":
            return
        is_float = group.dtype in FLOAT_DTYPES
        if scheme is None and not is_float:
            expected = self.spec.dtype
        elif scheme is not None and scheme.bits < 16 and is_float:
            expected = f"{scheme.name}, {scheme.bits} bits"
        else:
            return
        self.wrong_dtype.append(
            Difference(group.name, expected, group.dtype, group.count, group.file)
        )

    def explain_rest(self) -> None:
        """Sorts the stored tensors that no prediction names by the custom that explains them."""
        for name, group in self.groups.items():
            if name in self.used:
                continue
            kind = self.kind_of(name)
            if kind is None:
                found = f"{group.dtype} {list(group.shape or ())}"
                self.unexpected.append(Difference(name, "nothing", found, group.count, group.file))
                continue
            self.explained[kind] += group.count
            if kind == "tower":
                self.tower_elements += group.num_elements

    def kind_of(self, name: str) -> str | None:
        if name.endswith(_BUFFERS):
            return "buffer"
        if name.endswith(_HEADS) and self.spec.tie_embeddings:
            return "tied head"
        if self.is_side_tensor(name):
            return "quantisation"
        if self.spec.towers and any(word in name.split(".layers.")[0] for word in _TOWER_WORDS):
            return "tower"
        if name.startswith(("mtp.", "model.mtp")) or self.is_extra_layer(name):
            return "mtp"
        if _is_pooler(name) or self.is_task_head(name):
            return "task head"
        return None

    def is_task_head(self, name: str) -> bool:
        if self.spec.kind != "encoder" and not self.spec.architecture.endswith(_JUDGES):
            return False
        return name.partition(".")[0] in _TASK_HEADS

    def is_side_tensor(self, name: str) -> bool:
        if self.spec.quantization is None:
            return False
        return any(
            name.endswith(suffix) and name[: -len(suffix)] in self.places for suffix in _SIDE
        )

    def is_extra_layer(self, name: str) -> bool:
        """Whether `name` lies in a layer behind the last one, as unannounced MTP layers do."""
        head, _, rest = name.partition("layers.")
        number = rest.partition(".")[0]
        inside = head == self.layers_prefix and number.isdecimal() and len(number) < 9
        return inside and int(number) >= self.spec.num_layers

    def result(self) -> Comparison:
        mtp_stored = self.mtp_found or "mtp" in self.explained if self.spec.mtp_layers else None
        return Comparison(
            comparable=True,
            matched=self.matched,
            num_parameters=self.num_parameters,
            missing=tuple(self.missing + (self.missing_mtp if self.mtp_found else [])),
            unexpected=tuple(self.unexpected),
            wrong_shape=tuple(self.wrong_shape),
            wrong_dtype=tuple(self.wrong_dtype),
            explained=tuple(sorted(self.explained.items())),
            tower_elements=self.tower_elements,
            mtp_stored=mtp_stored,
            knows_storage=self.knows_storage,
        )

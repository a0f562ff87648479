"""What an adapter is: its configuration, its keys, its tensors, and the modules that they change.

Holds the nouns only, as the files tell them. Reading files is `read.py`, the grammar of keys is
`keys.py`, what training meant by a scale is `scale.py`; what an engine makes of it is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Matrix(StrEnum):
    """What a tensor of an adapter is to its module.

    `A` comes first in the forward pass (in → rank) and `B` second, whatever the writer calls them.
    `BIAS_B` is `lora_B.bias`; `SAVED` a full weight or bias that was trained (modules_to_save,
    bias="all"); `BASE` a copy of the base model's own weight; `TOKENS` the rows of
    `trainable_tokens_delta`; `OTHER` a parameter of another method than LoRA, or an unknown one.
    """

    A = "A"
    B = "B"
    EMBEDDING_A = "embedding_A"
    EMBEDDING_B = "embedding_B"
    MAGNITUDE = "magnitude"
    BIAS_B = "bias_B"
    SAVED = "saved"
    BASE = "base"
    TOKENS = "tokens"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """One key of an adapter's file, taken apart.

    `text` is the key as stored. `module` is the path in the trained model's own tree, without the
    `wrappers` that stood before or inside it (`base_model`, `_orig_mod`, `base_layer`, …, in
    order). `adapter_name` is the adapter's name where the key carries one. `parameter` is the
    writer's own word for the parameter: `lora_A`, `linear_in`, `vera_lambda_d`, `weight`, …
    """

    text: str
    wrappers: tuple[str, ...]
    module: str
    matrix: Matrix
    adapter_name: str | None
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """One stored tensor. `dtype` and `shape` are the header's; `start` is its offset in `file`.

    Of a pickle the shape and type are told from its opcodes, and `start` is None.
    """

    key: AdapterKey
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str
    start: int | None = None


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The adapter's configuration, checked field by field.

    `peft_type` is upper case (`LORA`, `VERA`, …); `writer` names the program whose layout this is
    (`peft`, `unsloth`, `mlx`, …). `rank` and `alpha` are None where the file does not say.
    `scale` is a scale that the writer gives outright (MLX), else None. `variants` names what of
    the configuration changes the sum base + scale·B·A (`dora`, `qalora`, `alora`, …). `raw` is the
    parsed JSON; `unread` are its keys that this reader does not know, in order.
    """

    peft_type: str
    writer: str
    rank: int | None = None
    alpha: float | None = None
    scale: float | None = None
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    bias: str = "none"
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str = True
    layer_replication: tuple[tuple[int, int], ...] | None = None
    alora_invocation_tokens: tuple[int, ...] | None = None
    trainable_token_indices: Mapping[str, tuple[int, ...]] | tuple[int, ...] | None = None
    use_qalora: bool = False
    use_bdlora: bool = False
    task_type: str | None = None
    base_model: str | None = None
    revision: str | None = None
    auto_mapping: Mapping[str, object] | None = None
    variants: tuple[str, ...] = ()
    raw: Mapping[str, object] | None = None
    unread: tuple[str, ...] = ()
    file: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """One module of the trained model that the adapter changes.

    `a` and `b` hold LoRA's pair (also an embedding's). `saved` are this module's other tensors;
    their `key.matrix` tells which. `rank` is what the shapes say, None where they say nothing or
    contradict each other (`fault` then says how); `rank_declared` and `scale` are what the
    configuration means for this module: ΔW = scale · B · A.

    `in_features`, `out_features` are the base weight's sides as the pair fits them, with
    `num_experts` matrices of that shape where the pair covers a stack of experts. `transposed`:
    A is stored as [in, rank] and B as [rank, out] (MLX).
    """

    module: str
    a: AdapterTensor | None = None
    b: AdapterTensor | None = None
    magnitude: AdapterTensor | None = None
    bias_b: AdapterTensor | None = None
    saved: tuple[AdapterTensor, ...] = ()
    rank: int | None = None
    rank_declared: int | None = None
    scale: float | None = None
    in_features: int | None = None
    out_features: int | None = None
    num_experts: int | None = None
    transposed: bool = False
    fault: str | None = None

    @property
    def tensors(self) -> tuple[AdapterTensor, ...]:
        """All tensors of the module."""
        pair = (self.a, self.b, self.magnitude, self.bias_b)
        return (*(tensor for tensor in pair if tensor is not None), *self.saved)

    @property
    def adapter_name(self) -> str | None:
        """The adapter's name that the keys carry, None where they carry none."""
        names = [t.key.adapter_name for t in self.tensors if t.key.adapter_name is not None]
        return names[0] if names else None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter: `modules` in the order of their first tensor, `files` as read.

    `from_pickle`: the tensors lie in a pickle, which was listed by its opcodes and never loaded.
    `missing_files` are shards that an index file names but that are not there. `unused_files` hold
    weights too, but were not chosen.
    """

    path: str
    config: AdapterConfig
    tensors: tuple[AdapterTensor, ...]
    modules: tuple[AdapterModule, ...]
    files: tuple[str, ...]
    from_pickle: bool = False
    missing_files: tuple[str, ...] = ()
    unused_files: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data, headers not counted."""
        return sum(tensor.num_bytes for tensor in self.tensors)

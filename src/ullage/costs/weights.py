"""Bytes of weights: as stored in a checkpoint, and as one rank holds them in vLLM 0.32.

Pure functions of a plain ModelSpec; a range comes from asking about `Anatomy.low` and `.high`.
Shapes and names are `anatomy/tensors/expected.py`; schemes are `anatomy/quantization/read.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ullage.anatomy.quantization.match import SchemeTable, scheme_table
from ullage.anatomy.spec import LatentAttention, ModelSpec, WeightScheme
from ullage.anatomy.tensors.expected import TensorSpec, expected_tensors
from ullage.costs.deployment import Parallel

VOCAB_PADDING = 64  # vLLM 0.32 vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE

DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip

APPROXIMATIONS = (
    "of towers only the linears of their blocks are cut by tensor parallelism, and only where it "
    "divides their heads; projectors are counted whole",
    "padding that a kernel wants inside a packed matrix (MXFP4 and Marlin layouts) is not counted",
    "LoRA slots, EPLB's redundant experts and CPU offload are not counted",
)
"""What `weight_bytes` leaves out of vLLM's behaviour; figures made with it are `modelled`."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes by part. `attention` holds every token mixer, `mlp` dense and shared experts,
    `experts` routed experts with their routers, `absorbed` what the engine derives and keeps
    beside the stored weights (MLA). `mtp` is outside of `total`: it is off unless asked for."""

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    experts: int = 0
    norms: int = 0
    lm_head: int = 0
    towers: int = 0
    other: int = 0
    absorbed: int = 0
    mtp: int = 0

    @property
    def total(self) -> int:
        """All parts but multi-token prediction."""
        return self.with_mtp - self.mtp

    @property
    def with_mtp(self) -> int:
        """All parts."""
        return sum(size for _, size in self.parts())

    def parts(self) -> tuple[tuple[str, int], ...]:
        """(part, bytes) in the order of the fields."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))


_PARTS = {
    role: part
    for part, roles in {
        "embedding": "embed position",
        "attention": "q k v qkv o attn_gate sinks attn_bias_table q_a q_b kv_a kv_b indexer "
        "compressor mamba_in mamba_out mamba linear_in linear_out linear conv",
        "mlp": "gate up down gate_up shared_gate shared_up shared_down shared_gate_up "
        "shared_router",
        "experts": "router hash_table expert_gate expert_up expert_down expert_gate_up "
        "expert_bias latent",
        "norms": "norm",
        "lm_head": "lm_head",
        "towers": "tower",
        "other": "scale hyper per_layer mtp",
    }.items()
    for role in roles.split()
}


def stored_bytes(spec: ModelSpec) -> WeightBytes:
    """Bytes of the checkpoint's tensors by part: packed weights, scales, zeros, scalars.

    Headers and padding of the files are not counted; multi-token prediction lies in `mtp`.
    """
    sums = _Sums()
    table = _table(spec)
    for tensor in expected_tensors(spec):
        scheme = _scheme(table, tensor)
        sums.add(tensor, tensor_bytes(tensor, tensor.shape, tensor.count, scheme, spec.dtype))
    return sums.result()


def stage_layers(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """[first, last) layer of every pipeline stage, as vLLM 0.32's get_pp_indices deals them.

    Layers left over go to the stages from the last but one backwards.
    """
    sizes = [num_layers // num_stages] * num_stages
    for extra in range(2, num_layers % num_stages + 2):
        sizes[-extra] += 1
    bounds, first = [], 0
    for size in sizes:
        bounds.append((first, first + size))
        first += size
    return tuple(bounds)


def weight_bytes(
    spec: ModelSpec,
    parallel: Parallel = Parallel(),  # noqa: B008  (frozen)
    *,
    stage: int | None = None,
    rank: int = 0,
    dtype: str | None = None,
) -> WeightBytes:
    """Bytes that one rank holds, by part; approximations are listed in `APPROXIMATIONS`.

    Args:
        stage: the pipeline stage, None for the heaviest (multi-token prediction not counted).
        rank: index among the tensor × context × data ranks of the stage; matters only for
            experts that do not divide evenly (the first ranks hold one more).
        dtype: what unquantised weights are loaded as, None for the checkpoint's own.
    """
    stages = all_stages(spec, parallel, rank=rank, dtype=dtype)
    return max(stages, key=lambda held: held.total) if stage is None else stages[stage]


def all_stages(
    spec: ModelSpec, parallel: Parallel, *, rank: int = 0, dtype: str | None = None
) -> tuple[WeightBytes, ...]:
    """`weight_bytes` of every pipeline stage, first to last.

    Embeddings, positions, towers and an encoder lie on the first stage; the final norm, the output
    head (a second copy of tied embeddings when there are several stages) and multi-token prediction
    on the last.
    """
    bounds = stage_layers(len(spec.layers), parallel.pipeline)
    sums = [_Sums() for _ in bounds]
    last = len(bounds) - 1
    stage_of = [s for s, (first, end) in enumerate(bounds) for _ in range(first, end)]
    table = _table(spec)
    held_dtype = dtype or spec.dtype
    main = "encoder" if spec.kind == "encoder" else "decoder"
    sizes: dict[tuple[object, ...], int] = {}
    for tensor in expected_tensors(spec):
        scheme = _scheme(table, tensor)
        key = (tensor.shape, tensor.count, tensor.shard, tensor.cut, tensor.grouped, tensor.dtype,
               tensor.held_dtype, tensor.sequence_whole, scheme)  # fmt: skip
        size = sizes.get(key)
        if size is None:
            shape, count = local_shape(tensor, parallel, rank)
            size = tensor_bytes(tensor, shape, count, scheme, tensor.held_dtype or held_dtype)
            sizes[key] = size
        if tensor.stack == "mtp":
            sums[last].add(tensor, size)
        elif tensor.layer is not None and tensor.stack == main:
            sums[stage_of[tensor.layer]].add(tensor, size)
        elif tensor.role in ("lm_head", "norm", "bias") and tensor.stack == main:
            at_start = tensor.role != "lm_head" and not sums[0].past_embeddings
            sums[0 if at_start else last].add(tensor, size)
        else:
            sums[0].add(tensor, size)
            if tensor.role == "embed" and spec.tie_embeddings and spec.lm_head and last:
                sums[last].sizes["lm_head"] += size
        if tensor.layer is not None and tensor.stack == main:
            sums[0].past_embeddings = True
    for layer, stage in zip(spec.layers, stage_of, strict=True):
        if isinstance(layer.mixer, LatentAttention):
            sums[stage].sizes["absorbed"] += _absorbed(layer.mixer, parallel, held_dtype)
    return tuple(each.result() for each in sums)


def local_shape(
    tensor: TensorSpec, parallel: Parallel, rank: int = 0
) -> tuple[tuple[int, ...], int]:
    """(shape, count) of the part of a tensor that one rank holds.

    Rules of vLLM 0.32: equal parts (rounded up where they do not divide: vLLM refuses those); at
    least one KV head or state-space group per rank; a vocabulary padded to 64; experts dealt out
    over tensor × context × data ranks, or each cut by all of them without expert parallelism;
    shared experts whole where expert, tensor and data parallelism make mixtures sequence-parallel.
    """
    tp, shape, count = parallel.tensor, list(tensor.shape), tensor.count
    if tensor.shard == "expert":
        width = tp * parallel.context * parallel.data
        if parallel.expert:
            mine = tensor.num_experts // width + (rank < tensor.num_experts % width)
            if tensor.count > 1:
                count = mine
            else:
                shape[0] = mine
        elif tensor.cut is not None:
            shape[tensor.cut] = -(-shape[tensor.cut] // width)
        return tuple(shape), count
    cut = tensor.cut
    together = parallel.expert and tp > 1 and parallel.data > 1
    if cut is None or tensor.shard == "replicated" or (tensor.sequence_whole and together):
        return tensor.shape, count
    size = shape[cut]
    if tensor.shard == "tower":
        if tensor.groups % tp == 0:
            shape[cut] = size - tensor.grouped + -(-tensor.grouped // tp)
    elif tensor.shard == "vocab":
        padded = -(-size // VOCAB_PADDING) * VOCAB_PADDING
        shape[cut] = -(-padded // tp)
    elif tensor.shard == "kv":
        shape[cut] = _grouped(size, tensor.groups, tp)
    elif tensor.shard == "qkv":
        shape[cut] = -(-(size - tensor.grouped) // tp) + _grouped(tensor.grouped, tensor.groups, tp)
    else:
        shape[cut] = -(-size // tp)
    return tuple(shape), count


def _grouped(rows: int, groups: int, tp: int) -> int:
    """Rows of `groups` heads on one of tp ranks, each rank holding at least one whole head."""
    return -(-groups // tp) * (rows // groups) if groups else -(-rows // tp)


def tensor_bytes(
    tensor: TensorSpec,
    shape: tuple[int, ...],
    count: int,
    scheme: WeightScheme | None,
    dtype: str,
) -> int:
    """Bytes of `count` tensors of `shape`, packed as `scheme` says, else in the model's dtype."""
    elements = count
    for size in shape:
        elements *= size
    if scheme is None:
        return elements * DTYPE_BYTES[tensor.dtype or dtype]
    if elements == 0:
        return 0
    inputs = shape[tensor.in_dim]
    if len(shape) == 3:  # stacked experts: one matrix each
        count *= shape[0]
    return count * matrix_bytes(elements // count // inputs, inputs, scheme)


def matrix_bytes(rows: int, columns: int, scheme: WeightScheme) -> int:
    """Bytes of one [rows out, columns in] matrix: codes, scales, zeros, scalars, indices."""
    codes = -(-rows * columns * scheme.bits // 8)
    if scheme.block is not None:
        scales = -(-rows // scheme.block[0]) * -(-columns // scheme.block[1])
    elif scheme.group > 0:
        scales = rows * -(-columns // scheme.group)
    else:
        scales = rows if scheme.group == 0 else 1
    side = -(-scales * (scheme.scale_bits + scheme.zero_bits) // 8)
    return codes + side + 4 * scheme.tensor_scales + -(-columns * scheme.index_bits // 8)


def _absorbed(mixer: LatentAttention, parallel: Parallel, dtype: str) -> int:
    """kv_b_proj split in two and kept once more, dequantised (vLLM 0.32 mla_attention.py)."""
    heads = -(-mixer.num_heads // parallel.tensor)
    rows = heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    return rows * mixer.kv_lora_rank * DTYPE_BYTES[dtype]


def _table(spec: ModelSpec) -> SchemeTable | None:
    return None if spec.quantization is None else scheme_table(spec.quantization)


def _scheme(table: SchemeTable | None, tensor: TensorSpec) -> WeightScheme | None:
    if table is None:
        return None
    if table.names_every_tensor:
        return table.stored(tensor.name)
    return None if not tensor.quantizable else table.scheme(tensor.module, tensor.role)


class _Sums:
    """Bytes by part while they are added up. A bias goes with the matrix before it."""

    def __init__(self) -> None:
        self.sizes = {f.name: 0 for f in fields(WeightBytes)}
        self.part = "other"
        self.past_embeddings = False

    def add(self, tensor: TensorSpec, size: int) -> None:
        if tensor.role != "bias":
            self.part = _PARTS[tensor.role]
        self.sizes["mtp" if tensor.stack == "mtp" else self.part] += size

    def result(self) -> WeightBytes:
        return WeightBytes(**self.sizes)

"""Rules about quantised matrices that tensor parallelism cuts: blocks, groups, kernel tiles.

Holds the local shapes and what vLLM 0.32's loaders demand of them; everything else about
quantisation is `quantization.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

from ullage.anatomy.spec import ModelSpec, WeightScheme
from ullage.audit import vllm
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity

if TYPE_CHECKING:
    from ullage.anatomy.tensors.expected import TensorSpec

MERGED_ROLES = frozenset(
    ("q", "k", "v", "qkv", "gate", "up", "gate_up", "shared_gate", "shared_up", "shared_gate_up")
)
"""Roles that vLLM loads into one matrix with others; it lets those cut blocks short."""

LEAST_REFINED_BLOCK = 32
PADDED_SCHEMES = ("mxfp4",)
"""Schemes whose experts vLLM pads to whole groups per rank."""

TILED_SCHEMES = ("awq", "gptq", "int4")


@dataclass(frozen=True, slots=True)
class Matrix:
    """One kind of quantised matrix; rows are the output, columns the input dimension."""

    role: str
    module: str
    rows: int
    columns: int
    cut: str
    groups: int
    scheme: WeightScheme

    @property
    def of_experts(self) -> bool:
        return self.role.startswith("expert_")

    def local(self, ranks: int, expert_parallel: bool) -> tuple[int, int] | None:
        """(rows, columns) on one rank, None where the sizes cannot be cut so."""
        if self.of_experts and expert_parallel:
            return self.rows, self.columns
        if self.cut == "columns":
            return (self.rows, self.columns // ranks) if self.columns % ranks == 0 else None
        if self.cut == "rows":
            shares = min(ranks, self.groups) if self.groups else ranks
            return (self.rows // shares, self.columns) if self.rows % shares == 0 else None
        return self.rows, self.columns


@lru_cache(maxsize=4)
def matrices(spec: ModelSpec) -> tuple[Matrix, ...]:
    """Each distinct quantised matrix of the decoder, the first module of its kind as its name."""
    if spec.quantization is None or not spec.quantization.schemes:
        return ()
    # Imported late: most audits are of models without quantisation, and should start at once.
    from ullage.anatomy.quantization.match import scheme_table
    from ullage.anatomy.tensors.expected import expected_tensors

    table = scheme_table(spec.quantization)
    found: dict[tuple[object, ...], Matrix] = {}
    for tensor in expected_tensors(spec):
        if not tensor.quantizable or tensor.stack in ("mtp", "tower") or len(tensor.shape) < 2:
            continue
        scheme = table.scheme(tensor.module, tensor.role)
        if scheme is None:
            continue
        key = (tensor.role, tensor.shape, tensor.shard, tensor.groups, scheme)
        if key not in found:
            found[key] = _matrix(tensor, scheme)
    return tuple(found.values())


def _matrix(tensor: TensorSpec, scheme: WeightScheme) -> Matrix:
    dims = len(tensor.shape)
    columns_at = tensor.in_dim % dims
    rows_at = next(i for i in range(dims - 1, -1, -1) if i != columns_at)
    cut = ""
    if tensor.cut is not None and tensor.shard not in ("replicated", "vocab", "qkv"):
        cut = "columns" if tensor.cut % dims == columns_at else "rows"
    return Matrix(
        tensor.role,
        tensor.module,
        tensor.shape[rows_at],
        tensor.shape[columns_at],
        cut,
        tensor.groups if tensor.shard == "kv" else 0,
        scheme,
    )


def _lacking(subject: Subject) -> NotEvaluable | None:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    quantization = subject.spec.quantization
    if quantization is not None and quantization.method not in vllm.QUANTIZATION_METHODS:
        return NotEvaluable((f"vLLM 0.32's rules for quantisation method {quantization.method}",))
    if quantization is not None and not quantization.schemes:
        return NotEvaluable((f"how quantisation method {quantization.method} stores weights",))
    return None


def _local_matrices(subject: Subject) -> Iterator[tuple[Matrix, int, int]]:
    parallel = subject.deployment.parallel
    for matrix in matrices(subject.spec):
        local = matrix.local(parallel.tensor, parallel.expert)
        if local is not None:
            yield matrix, *local


def _facts(subject: Subject, matrix: Matrix, rows: int, columns: int) -> tuple[Evidence, ...]:
    where = subject.where("quantization_config", "compression_config")
    return (
        subject.parallel_fact(),
        Evidence("module", matrix.module, "", "spec: names of the family"),
        Evidence("whole matrix", f"{matrix.rows} × {matrix.columns}", "", "spec"),
        Evidence("share of one rank", f"{rows} × {columns}", "", "calculated"),
        Evidence("quantisation", matrix.scheme.name, "", where),
    )


def _content(subject: Subject, name: str, number: int) -> Clear:
    return Clear((subject.parallel_fact(), Evidence(name, number, "", "quantisation of the spec")))


def _blocks(subject: Subject) -> Verdict:
    lacking = _lacking(subject)
    if lacking is not None:
        return lacking
    ranks = subject.tensor_parallel
    seen = 0
    weaker: Fired | None = None  # said only where no other matrix is a certain stop
    for matrix, rows, columns in _local_matrices(subject):
        block = matrix.scheme.block
        if block is None:
            continue
        seen += 1
        facts = _facts(subject, matrix, rows, columns)
        if matrix.of_experts:
            found = _cut_expert(matrix, rows, columns, ranks, facts)
        else:
            found = _cut_linear(matrix, rows, columns, ranks, facts)
        if found is not None and found.severity is None:
            return found
        weaker = weaker or found
    return weaker or _content(subject, "block-quantised kinds of matrix", seen)


def _cut_expert(
    matrix: Matrix, rows: int, columns: int, ranks: int, facts: tuple[Evidence, ...]
) -> Fired | None:
    assert matrix.scheme.block is not None, "asked only of block-quantised matrices"
    block = matrix.scheme.block
    width = columns if matrix.cut == "columns" else rows
    whole = matrix.columns if matrix.cut == "columns" else matrix.rows
    if matrix.cut == "" or width % block[0] == 0:
        return None
    refined = gcd(*block, width)
    if whole % block[0] and refined < LEAST_REFINED_BLOCK:
        return _cut_block(matrix, width, block[0], facts)
    how = (
        f"refines the scales to blocks of {refined}, which only its Triton kernels take"
        if refined >= LEAST_REFINED_BLOCK
        else "pads every share to whole blocks"
    )
    return Fired(
        f"An expert's width of {whole} over {ranks} ranks is {width}, not a multiple "
        f"of the quantisation block {block[0]}: vLLM 0.32 {how}.",
        f"Pass --enable-expert-parallel to keep experts whole, or a "
        f"--tensor-parallel-size that leaves a multiple of {block[0]}.",
        facts,
        Severity.warning,
    )


def _cut_linear(
    matrix: Matrix, rows: int, columns: int, ranks: int, facts: tuple[Evidence, ...]
) -> Fired | None:
    assert matrix.scheme.block is not None, "asked only of block-quantised matrices"
    block = matrix.scheme.block
    if ranks == 1:
        return None
    if matrix.cut == "columns" and columns % block[1]:
        return _cut_block(matrix, columns, block[1], facts)
    alone = matrix.cut == "rows" and matrix.role not in MERGED_ROLES
    if not alone or rows % block[0] == 0:
        return None
    if matrix.rows >= block[0]:
        return _cut_block(matrix, rows, block[0], facts)
    # A gate per head, say: 64 rows under blocks of 128. Releases often leave so small a matrix
    # as it was, and a configuration that lists no exceptions does not settle it.
    return Fired(
        f"{matrix.module} has {matrix.rows} rows, fewer than its quantisation block of {block[0]}, "
        f"and each of {ranks} ranks gets {rows}. If the checkpoint stores it quantised, as the "
        "configuration says, vLLM 0.32 refuses to load it.",
        "Look at its dtype in the checkpoint (audit the directory instead of config.json alone); "
        "if it is FP8, use the GPUs with --pipeline-parallel-size or --data-parallel-size.",
        facts,
        Severity.warning,
    )


def _cut_block(matrix: Matrix, size: int, block: int, facts: tuple[Evidence, ...]) -> Fired:
    return Fired(
        f"{matrix.module} leaves each rank {size} along the cut, not a multiple of its "
        f"quantisation block {block}: a block's scale would belong to two ranks, and "
        "vLLM 0.32 refuses to load.",
        f"Pass a --tensor-parallel-size that leaves a multiple of {block}, or use the other GPUs "
        "with --pipeline-parallel-size or --data-parallel-size.",
        facts,
    )


def _groups(subject: Subject) -> Verdict:
    lacking = _lacking(subject)
    if lacking is not None:
        return lacking
    seen = 0
    for matrix, rows, columns in _local_matrices(subject):
        group = matrix.scheme.group
        if group <= 0 or matrix.scheme.block or matrix.scheme.name.startswith(PADDED_SCHEMES):
            continue
        seen += 1
        if columns % group == 0:
            continue
        return Fired(
            f"{matrix.module} has {columns} inputs per rank, not a multiple of its quantisation "
            f"group of {group}: a group would belong to two ranks. {_what_then(matrix)}",
            f"Pass a --tensor-parallel-size that leaves a multiple of {group} of {matrix.columns}"
            + (", or --enable-expert-parallel." if matrix.of_experts else "."),
            _facts(subject, matrix, rows, columns),
        )
    return _content(subject, "group-quantised kinds of matrix", seen)


def _what_then(matrix: Matrix) -> str:
    # vllm 0.32, fused_moe/routed_experts.py, _load_w2: loaded_per_rank is rounded down for weights
    # and for scales alike; no loader of NVFP4 experts asks whether the division left a rest.
    if matrix.of_experts and matrix.scheme.name.startswith("nvfp4"):
        return (
            "vLLM 0.32 rounds the number of scales down and loads without a word: from the second "
            "rank on, weights meet the scales of other groups, and answers are wrong."
        )
    return "Its scale would belong to neither" + (
        "." if matrix.of_experts else ", and vLLM 0.32 refuses to load."
    )


def _tiles(subject: Subject) -> Verdict:
    lacking = _lacking(subject)
    if lacking is not None:
        return lacking
    seen = 0
    for matrix, rows, columns in _local_matrices(subject):
        if not matrix.scheme.name.startswith(TILED_SCHEMES):
            continue
        seen += 1
        if rows % vllm.MARLIN_MULTIPLE_OUT == 0 and columns % vllm.MARLIN_MULTIPLE_IN == 0:
            continue
        return Fired(
            f"{matrix.module} is {rows} × {columns} on each rank; Marlin, the fast 4-bit kernel, "
            f"works on multiples of {vllm.MARLIN_MULTIPLE_OUT} × {vllm.MARLIN_MULTIPLE_IN}, so "
            "vLLM 0.32 uses a slower one or refuses.",
            "Pass a smaller --tensor-parallel-size, whose shares are multiples of both.",
            _facts(subject, matrix, rows, columns),
        )
    return _content(subject, "4-bit kinds of matrix", seen)


RULES = (
    Rule(
        id="A081",
        title="Quantisation blocks under tensor parallelism",
        severity=Severity.error,
        category="quantisation",
        why="A block of weights shares one scale. Cut through a block, and its scale would belong "
        "to two ranks: most layers then refuse to load, experts fall to slower kernels.",
        fix="Choose a tensor-parallel size whose shares are whole blocks, or expert parallelism.",
        source="vllm 0.32: quantization/utils/fp8_utils.py, validate_fp8_block_shape; "
        "fused_moe/oracle/fp8.py",
        example="block 128 × 128 with moe_intermediate_size 1536 at --tensor-parallel-size 8: 192",
        check=_blocks,
    ),
    Rule(
        id="A082",
        title="Quantisation groups under tensor parallelism",
        severity=Severity.error,
        category="quantisation",
        why="Group-quantised weights have a scale per run of inputs (16 in NVFP4, 128 in most AWQ "
        "and GPTQ models). A rank must hold whole runs.",
        fix="Choose a tensor-parallel size whose shares are whole groups.",
        source="vllm 0.32: distributed/utils.py, verify_group_size_divides_partition; "
        "quantization/modelopt.py; fused_moe/routed_experts.py, _load_w2",
        example="AWQ with group_size 128 and intermediate_size 18944 at --tensor-parallel-size 8",
        check=_groups,
    ),
    Rule(
        id="A083",
        title="Kernel tiles of 4-bit weights",
        severity=Severity.warning,
        category="quantisation",
        why="The fast 4-bit kernel works in tiles of 64 outputs by 128 inputs. Other shapes load "
        "with a slower kernel, or not at all.",
        fix="Choose a tensor-parallel size whose shares are whole tiles.",
        source="vllm 0.32: quantization/utils/marlin_utils.py, verify_marlin_supports_shape",
        example="GPTQ with intermediate_size 11008 at --tensor-parallel-size 8: 1376 inputs",
        check=_tiles,
    ),
)

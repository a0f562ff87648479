"""What vLLM 0.32 decides where a flag was left open: dtypes, limits, block size, cache mode.

Holds those rules for CUDA and CPU, each with where it comes from. What follows for pages and
blocks is `vllm_pages.py`, `vllm_groups.py` and `vllm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    LatentAttention,
    LinearAttention,
    Mamba,
    ModelSpec,
    ShortConv,
)
from ullage.anatomy.spec import Parallel as ParallelMixer
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import HardwareSpec
from ullage.costs.kv import kv_heads_per_rank
from ullage.planning.vllm_pages import (
    PageRules,
    attention_state_bytes,
    latent_state_bytes,
    state_page_bytes,
)

Usage = Literal["server", "library"]
"""Defaults of the limits differ between `vllm serve` and the LLM class."""

GIB = 2**30
DEFAULT_BLOCK_TOKENS = 16
"""config/cache.py, DEFAULT_BLOCK_SIZE."""

COMPUTE_CAPABILITY = {
    "A100-80": (8, 0),
    "L40S": (8, 9),
    "RTX-4090": (8, 9),
    "H100-SXM": (9, 0),
    "H200": (9, 0),
    "B200": (10, 0),
}
"""By the names of hardware.toml (NVIDIA's table of CUDA GPUs)."""

ASSUMED_CAPABILITY = (9, 0)
ASSUMED_MEMORY_BYTES = 80 * GIB


@dataclass(frozen=True, slots=True)
class Decision:
    """One setting as the engine resolves it, and why: a flag, the config, or a rule of vLLM's."""

    name: str
    value: str | int | float | bool | None
    source: str


@dataclass(frozen=True, slots=True)
class Decisions:
    """Everything that shapes the KV cache. Lengths in tokens; see `notes` for the sources.

    `in_flight_tokens` are scheduled but not settled at most. `state_block_size` 0: no state.
    `refusals` are reasons for which vLLM stops before it looks at memory.
    """

    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    fit_max_model_len: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    in_flight_tokens: int
    enable_prefix_caching: bool
    aligned_states: bool
    hybrid_manager: bool
    block_outermost: bool
    rules: PageRules
    notes: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kinds:
    """Which mechanisms a stack has, as far as vLLM's decisions ask."""

    attention: Attention | None
    latent: LatentAttention | None
    compressed: CompressedAttention | None
    states: tuple[Mamba | LinearAttention | ShortConv, ...]
    sparse: bool
    sparse_gqa: bool
    chunked: bool
    encoder: bool
    head_dims: frozenset[int]

    @property
    def hybrid(self) -> bool:
        return bool(self.states) and self.attends

    @property
    def attends(self) -> bool:
        return bool(self.attention or self.latent or self.compressed)


def kinds_of(spec: ModelSpec) -> Kinds:
    """Look through the stack once, each distinct mixer once."""
    mixers: dict[object, None] = {}
    for layer in spec.layers:
        parts = layer.mixer.parts if isinstance(layer.mixer, ParallelMixer) else (layer.mixer,)
        for part in parts:
            mixers[part] = None
    attentions = [m for m in mixers if isinstance(m, Attention)]
    causal = [m for m in attentions if m.causal]
    latents = [m for m in mixers if isinstance(m, LatentAttention)]
    compressed = [m for m in mixers if isinstance(m, CompressedAttention)]
    return Kinds(
        attention=causal[0] if causal else None,
        latent=latents[0] if latents else None,
        compressed=compressed[0] if compressed else None,
        states=tuple(m for m in mixers if isinstance(m, Mamba | LinearAttention | ShortConv)),
        sparse=any(m.indexer is not None for m in latents),
        sparse_gqa=any(m.sparse_index is not None for m in causal),
        chunked=any(m.chunk for m in causal),
        encoder=bool(attentions) and not causal,
        head_dims=frozenset(m.head_dim for m in causal),
    )


def decide(
    spec: ModelSpec,
    deployment: Deployment,
    *,
    hardware: HardwareSpec | None = None,
    usage: Usage = "server",
) -> Decisions:
    """Resolve every open setting the way vLLM 0.32 does at start."""
    return _Deciding(spec, deployment, hardware, usage).decisions()


class _Deciding:
    """One pass over the settings in vLLM's order, since each may depend on those before."""

    def __init__(
        self,
        spec: ModelSpec,
        deployment: Deployment,
        hardware: HardwareSpec | None,
        usage: Usage,
    ) -> None:
        self.spec = spec
        self.flags = deployment
        self.kinds = kinds_of(spec)
        self.cpu = deployment.platform == "cpu"
        self.usage = usage
        self.hardware = hardware
        self.notes: list[Decision] = []
        self.warnings: list[str] = []
        self.refusals: list[str] = []
        self.capability = self._capability()

    def decisions(self) -> Decisions:
        dtype = self._dtype()
        kv_cache_dtype = self._kv_cache_dtype()
        max_model_len = self._max_model_len()
        prefix_caching, chunked_prefill = self._prefix_caching()
        seqs, batched = self._limits(max_model_len, chunked_prefill)
        in_flight = self._batches_in_flight() * batched
        aligned = bool(self.kinds.states) and prefix_caching
        rules = self._blocks(dtype, kv_cache_dtype, max_model_len, aligned)
        hybrid_manager = not self.kinds.chunked
        if self.kinds.chunked:
            self._note(
                "hybrid_kv_cache_manager",
                False,
                "off for chunked local attention (config/vllm.py): chunked layers keep all tokens",
            )
        return Decisions(
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            fit_max_model_len=self.flags.max_model_len == -1,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            in_flight_tokens=in_flight,
            enable_prefix_caching=prefix_caching,
            aligned_states=aligned,
            hybrid_manager=hybrid_manager,
            block_outermost=self.kinds.compressed is not None,
            rules=rules,
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
            refusals=tuple(self.refusals),
        )

    def _note(self, name: str, value: str | int | float | bool | None, source: str) -> None:
        self.notes.append(Decision(name, value, source))

    # --- dtypes and lengths ----------------------------------------------------------------------

    def _dtype(self) -> str:
        named = {"half": "float16", "float": "float32"}
        if self.flags.dtype not in (None, "auto"):
            dtype = named.get(str(self.flags.dtype), str(self.flags.dtype))
            self._note("dtype", dtype, "flag --dtype")
            return dtype
        dtype = named.get(self.spec.dtype, self.spec.dtype)
        if dtype == "float32":
            # The first dtype that the platform lists; float16 for pooling models.
            dtype = "float16" if self.kinds.encoder else "bfloat16"
            self._note("dtype", dtype, "vLLM: float32 checkpoints are served in 16 bits")
        else:
            self._note("dtype", dtype, "config: dtype")
        return dtype

    def _kv_cache_dtype(self) -> str:
        asked = self.flags.kv_cache_dtype
        quantization = self.spec.quantization
        source = "flag --kv-cache-dtype"
        if asked == "auto":
            source = "the model's dtype (auto)"
            if quantization is not None and quantization.kv_scheme is not None:
                asked, source = self._checkpoint_kv_dtype(
                    quantization.method, quantization.kv_scheme
                )
        if self.kinds.compressed is not None and not self.cpu:
            if asked != "auto" and not asked.startswith("fp8"):
                self.refusals.append(f"compressed attention keeps fp8_ds_mla, not {asked}")
            asked, source = "fp8_ds_mla", "vLLM: what its kernels for compressed attention keep"
        if self.kinds.sparse and not self.cpu and self.capability[0] == 9 and asked[:3] == "fp8":
            asked, source = "fp8_ds_mla", "vLLM: fp8 of sparse latent attention is fp8_ds_mla"
        if asked == "bfloat16" and self.kinds.sparse:
            asked, source = "auto", "vLLM: bfloat16 means auto for sparse latent attention"
        self._note("kv_cache_dtype", asked, source)
        if self.cpu and asked not in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"):
            self.warnings.append(f"kv cache dtype {asked} is not one of the CPU backend's")
        return asked

    def _checkpoint_kv_dtype(self, method: str, scheme: str) -> tuple[str, str]:
        """What `auto` becomes when the checkpoint names a KV scheme (utils/torch_utils.py)."""
        if method.startswith("modelopt"):
            known = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(scheme.lower())
            if known is not None:
                return known, f"checkpoint: {method} asks for {scheme} KV"
            self.warnings.append(f"vLLM does not know the KV scheme {scheme!r} and keeps auto")
            return "auto", f"checkpoint asks for {scheme} KV, which vLLM does not know"
        if method == "compressed-tensors":
            return "fp8", "checkpoint: compressed-tensors with a KV scheme means fp8"
        return "auto", f"the model's dtype: vLLM ignores a KV scheme of {method}"

    def _max_model_len(self) -> int:
        asked = self.flags.max_model_len
        derived = self.spec.max_positions
        if asked is None or asked == -1:
            self._note("max_model_len", derived, "config: the model's own maximum")
            return derived
        self._note("max_model_len", asked, "flag --max-model-len")
        if derived and asked > derived:
            self.refusals.append(
                f"max_model_len {asked:,} is above the model's own maximum of {derived:,} tokens"
            )
        return asked

    # --- limits ----------------------------------------------------------------------------------

    def _capability(self) -> tuple[int, int]:
        if self.cpu:
            return (0, 0)
        if self.hardware is None:
            self.warnings.append(
                "no GPU was named: defaults that depend on it are those of a Hopper with 80 GB"
            )
            return ASSUMED_CAPABILITY
        known = COMPUTE_CAPABILITY.get(self.hardware.name)
        if known is None:
            self.warnings.append(
                f"the attention kernels of {self.hardware.name} are not reproduced: block size "
                f"{DEFAULT_BLOCK_TOKENS} is assumed where none is given"
            )
            return (0, 0)
        return known

    def _prefix_caching(self) -> tuple[bool, bool]:
        """(prefix caching, chunked prefill), from config/model.py and platforms/cpu.py."""
        name, asked = "enable_prefix_caching", self.flags.enable_prefix_caching
        if self.kinds.encoder:
            self._note(name, False, "vLLM: off for bidirectional encoders")
            return False, False
        if self.cpu and self.kinds.latent is not None:
            self._note(name, False, "vLLM: off for latent attention on a CPU without AMX")
            return False, False
        if asked is not None:
            self._note(name, asked, "flag --enable-prefix-caching")
            return asked, True
        default = self.kinds.attends
        self._note(name, default, "vLLM: on" if default else "vLLM: off without attention")
        return default, True

    def _limits(self, max_model_len: int, chunked_prefill: bool) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens), from engine/arg_utils.py."""
        seqs_default, batched_default, source = self._limit_defaults()
        seqs = self.flags.max_num_seqs or seqs_default
        batched = self.flags.max_num_batched_tokens
        if batched is None:
            batched = batched_default if chunked_prefill else max(max_model_len, batched_default)
            batched = min(batched, seqs * max_model_len)
            batched_source = source
        else:
            batched_source = "flag --max-num-batched-tokens"
        seqs_source = "flag --max-num-seqs"
        if self.flags.max_num_seqs is None:
            seqs, seqs_source = min(seqs, batched), source
        if not chunked_prefill and batched < max_model_len:
            self.refusals.append(
                f"max_num_batched_tokens {batched:,} is below max_model_len {max_model_len:,} "
                "where prefill cannot be chunked"
            )
        if batched < seqs:
            self.refusals.append(
                f"max_num_batched_tokens {batched:,} is below max_num_seqs {seqs:,}"
            )
        if self.cpu and self.kinds.latent is not None:
            batched = max(max_model_len, 2048)
            batched_source = "vLLM: latent attention on a CPU prefills in one piece"
        self._note("max_num_seqs", seqs, seqs_source)
        self._note("max_num_batched_tokens", batched, batched_source)
        return seqs, batched

    def _limit_defaults(self) -> tuple[int, int, str]:
        """(max_num_seqs, max_num_batched_tokens, source) by device and usage."""
        server = self.usage == "server"
        if self.cpu:
            world = self.flags.parallel.tensor * self.flags.parallel.pipeline
            seqs, batched = (128, 2048) if server else (256, 4096)
            return seqs * world, batched * world, "vLLM's default on a CPU, times the ranks"
        memory, name = ASSUMED_MEMORY_BYTES, ""
        if self.hardware is not None:
            memory, name = self.hardware.memory_bytes, self.hardware.device_name.lower()
        if memory >= 160 * GIB:
            return 1024, 16384, "vLLM's default for a GPU of 160 GiB or more"
        if memory >= 70 * GIB and "a100" not in name:
            return 1024, 8192 if server else 16384, "vLLM's default for a GPU of 70 GiB or more"
        return 256, 2048 if server else 8192, "vLLM's default for an A100 or a smaller GPU"

    def _batches_in_flight(self) -> int:
        """Batches that may be scheduled but not settled (config/vllm.py, max_concurrent_batches).

        CUDA runs model runner V2, which schedules one batch ahead of every pipeline stage.
        """
        pipeline = self.flags.parallel.pipeline
        asked = self.flags.async_scheduling
        if self.cpu:
            self._note("async_scheduling", False, "vLLM: never on a CPU")
            return pipeline
        ahead = asked if asked is not None else not self.kinds.encoder
        source = "flag --async-scheduling" if asked is not None else "vLLM's default"
        self._note("async_scheduling", ahead, source)
        return pipeline + 1 if ahead else pipeline

    # --- blocks ----------------------------------------------------------------------------------

    def _refuse_what_has_no_kernel(self) -> None:
        if self.cpu and (self.kinds.sparse or self.kinds.sparse_gqa):
            self.refusals.append("vLLM has no kernel for sparse attention on a CPU")
        if self.cpu and self.kinds.compressed is not None:
            self.refusals.append("vLLM's compressed attention needs a CPU with AMX")
        sparse = self.kinds.sparse or self.kinds.compressed is not None
        if not self.cpu and sparse and self.capability[0] in (7, 8):
            self.refusals.append("vLLM's sparse latent kernels need a Hopper GPU or a newer one")

    def _blocks(
        self, dtype: str, kv_cache_dtype: str, max_model_len: int, aligned: bool
    ) -> PageRules:
        self._refuse_what_has_no_kernel()
        kernel, fixed = self._kernel_block(kv_cache_dtype)
        block = self._block_size(kernel)
        padded = 0
        if self.kinds.hybrid:
            block, padded = self._grow_block(block, kernel, dtype, kv_cache_dtype)
        if self.kinds.attends and (block % kernel or (self._cpu_latent and block != kernel)):
            self.refusals.append(
                f"a block of {block} tokens is not one that the attention kernels take "
                f"({'exactly' if self._cpu_latent else 'multiples of'} {kernel})"
            )
        state_block = 0
        if self.kinds.states:
            state_block = block if aligned else max_model_len
            source = "vLLM: align with prefix caching, none without"
            self._note("mamba_cache_mode", "align" if aligned else "none", source)
        return PageRules(
            tensor=self.flags.parallel.tensor,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block,
            kernel_block=kernel,
            latent_stride_base=kernel if fixed else 0,
            state_block_size=state_block,
            state_padded_bytes=padded,
        )

    @property
    def _cpu_latent(self) -> bool:
        return self.cpu and self.kinds.latent is not None

    def _kernel_block(self, kv_cache_dtype: str) -> tuple[int, bool]:
        """(tokens that kernel blocks are a multiple of, whether the kernel takes only that size).

        The backends' get_supported_kernel_block_sizes, in the order in which platforms/cuda.py
        prefers them: FlashAttention and Triton 16, FlashMLA and every sparse latent kernel 64,
        FlashInfer's latent kernel 32, block-sparse GQA 128, compressed attention 256; CPU 32, its
        latent kernel 16.
        """
        if self.kinds.compressed is not None:
            return 256, True
        if self.cpu:
            return (16, True) if self.kinds.latent is not None else (32, False)
        if self.kinds.sparse_gqa:
            return 128, True
        if self.kinds.sparse:
            return 64, True
        if self.kinds.latent is None:
            return 16, False
        major = self.capability[0]
        if major == 10:
            known = self.kinds.latent.qk_nope_head_dim in (64, 128, 192)
            return (32, True) if known else (128, True)
        if major == 9 and kv_cache_dtype != "auto" and kv_cache_dtype.startswith("fp8"):
            return 64, True
        return 16, False

    def _block_size(self, kernel: int) -> int:
        asked = self.flags.block_size
        if self.cpu and (self._cpu_latent or self.kinds.compressed is not None):
            self._note("block_size", kernel, "vLLM: the only size of the CPU's latent kernel")
            return kernel
        if asked is not None:
            self._note("block_size", asked, "flag --block-size")
            return asked
        if self.cpu:
            self._note("block_size", 128, "vLLM's default on a CPU")
            return 128
        block = DEFAULT_BLOCK_TOKENS if DEFAULT_BLOCK_TOKENS % kernel == 0 else kernel
        self._note("block_size", block, "vLLM's default, or the least that its kernels take")
        return block

    def _grow_block(
        self, block: int, kernel: int, dtype: str, kv_cache_dtype: str
    ) -> tuple[int, int]:
        """(block size, padded bytes of a state page or 0) so that an attention page holds a state.

        platforms/interface.py, _align_hybrid_block_size.
        """
        tensor = self.flags.parallel.tensor
        state = max(state_page_bytes(mixer, tensor, dtype) for mixer in self.kinds.states)
        if self.kinds.latent is not None:
            token = latent_state_bytes(self.kinds.latent, kv_cache_dtype, dtype)
        elif self.kinds.attention is not None:
            mixer = self.kinds.attention
            token = attention_state_bytes(
                kv_heads_per_rank(mixer.num_kv_heads, tensor),
                mixer.head_dim,
                mixer.v_head_dim,
                kv_cache_dtype,
                dtype,
            )
        else:
            return block, 0
        step = max(kernel, block, 128 if self.kinds.latent is not None else 0)
        grown = step * -(-state // (step * token))
        grown = kernel * -(-grown // kernel)
        if grown > block:
            self._note(
                "block_size", grown, f"vLLM: an attention page holds a state of {state:,} bytes"
            )
            block = grown
        return block, block * token if block * token != state else 0

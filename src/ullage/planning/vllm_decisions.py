"""What vLLM 0.32 decides where a flag was left open: dtypes, lengths, limits, prefix caching.

Holds those rules for CUDA and CPU, each with where it comes from; blocks are `vllm_blocks.py`. What
follows is `vllm_pages.py`, `vllm_groups.py`, `vllm_pool.py` and `vllm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ullage.anatomy.spec import ModelSpec
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import HardwareSpec
from ullage.planning.vllm_blocks import DEFAULT_BLOCK_TOKENS, decide_blocks
from ullage.planning.vllm_kinds import (
    Decision,
    architecture_settings,
    kinds_of,
    ropes_of,
)
from ullage.planning.vllm_pages import PageRules

__all__ = ["Decision", "Decisions", "Usage", "decide"]

Usage = Literal["server", "library"]
"""Defaults of the limits differ between `vllm serve` and the LLM class."""

GIB = 2**30
UNSAID_LENGTH = 2048
SCALED_IN_CONFIG = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE scaling whose factor the configured maximum length already includes."""

ASSUMED_CAPABILITY = (9, 0)
ASSUMED_MEMORY_BYTES = 80 * GIB


@dataclass(frozen=True, slots=True)
class Decisions:
    """Everything that shapes the KV cache. Lengths in tokens; see `notes` for the sources.

    `longest_model_len` is the model's own maximum; `fit_max_model_len`: the length is to be fitted
    to the memory. `in_flight_tokens` are scheduled but not settled at most. `aligned_states`:
    states are cached at block ends. `refusals` are reasons for which vLLM stops before it looks
    at memory.
    """

    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    longest_model_len: int
    fit_max_model_len: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    in_flight_tokens: int
    enable_prefix_caching: bool
    aligned_states: bool
    block_outermost: bool
    rules: PageRules
    notes: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


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
        self.settings = architecture_settings(spec.architecture) or {}
        self.ropes = ropes_of(spec)
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
        longest = self._longest_model_len()
        max_model_len = self._max_model_len(longest)
        prefix_caching, chunked_prefill = self._prefix_caching()
        seqs, batched = self._limits(max_model_len, chunked_prefill)
        in_flight = self._batches_in_flight() * batched
        aligned = bool(self.kinds.states) and prefix_caching
        blocks = decide_blocks(
            self.kinds,
            self.flags,
            capability_major=self.capability[0],
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            aligned_states=aligned,
        )
        return Decisions(
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            longest_model_len=longest,
            fit_max_model_len=self.flags.max_model_len == -1,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            in_flight_tokens=in_flight,
            enable_prefix_caching=prefix_caching,
            aligned_states=aligned,
            block_outermost=self.kinds.compressed is not None,
            rules=blocks.rules,
            notes=(*self.notes, *blocks.notes),
            warnings=(*self.warnings, *blocks.warnings),
            refusals=(*self.refusals, *blocks.refusals),
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
            own = self.settings.get(f"kv_cache_dtype.sm{self.capability[0]}")
            if asked == "auto" and own is not None:
                asked, source = own, f"vLLM: its default for {self.spec.architecture} on this GPU"
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

    def _max_model_len(self, longest: int) -> int:
        asked = self.flags.max_model_len
        if asked is None or asked == -1:
            default, source = longest, "config: the model's own maximum"
            if self.spec.max_positions <= 0:
                source = "vLLM: what it assumes where no key names a length (config/model.py)"
            originals = [r.original_max_positions for r in self.ropes if r.scaling == "longrope"]
            if originals:
                default = originals[0] or longest
                source = "vLLM: the unscaled maximum, for longrope"
            self._note("max_model_len", default, source)
            return default
        self._note("max_model_len", asked, "flag --max-model-len")
        if asked > longest:
            self.refusals.append(
                f"max_model_len {asked:,} is above the model's own maximum of {longest:,} tokens"
            )
        return asked

    def _longest_model_len(self) -> int:
        """The model's own maximum as vLLM derives it (config/model.py, _get_and_verify_max_len)."""
        if self.spec.max_positions <= 0:
            if self.flags.max_model_len is not None and self.flags.max_model_len > 0:
                return self.flags.max_model_len  # nothing limits what is asked for
            if self.flags.max_model_len == -1:
                self.refusals.append(
                    "vLLM fits max_model_len to the memory only below a maximum that the config "
                    "names, and this one names none"
                )
            self.warnings.append(f"no maximum length is configured: vLLM assumes {UNSAID_LENGTH:,}")
            return UNSAID_LENGTH
        if self.settings.get("rope_factor") == "included":
            return self.spec.max_positions
        factors = [r.factor for r in self.ropes if r.scaling not in SCALED_IN_CONFIG]
        factor = next((f for f in reversed(factors) if f != 1.0), 1.0)
        return int(self.spec.max_positions * factor)

    # --- limits ----------------------------------------------------------------------------------

    def _capability(self) -> tuple[int, int]:
        if self.cpu:
            return (0, 0)
        if self.hardware is None:
            self.warnings.append(
                "no GPU was named: defaults that depend on it are those of a Hopper with 80 GB"
            )
            return ASSUMED_CAPABILITY
        known = self.hardware.compute_capability
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
            if asked is None:
                self._note(name, False, "vLLM: off for bidirectional encoders")
            else:  # vLLM warns, and does as it was told
                self._note(name, asked, "flag --enable-prefix-caching")
            return asked or False, False
        if self.cpu and self.kinds.latent is not None:
            # Chunked prefill goes off as well, but only after the limits were checked with it on.
            self._note(name, False, "vLLM: off for latent attention on a CPU without AMX")
            return False, True
        if asked is not None:
            self._note(name, asked, "flag --enable-prefix-caching")
            return asked, True
        known = architecture_settings(self.spec.architecture)
        default = self.kinds.attends if known is None else known.get("attention") != "none"
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

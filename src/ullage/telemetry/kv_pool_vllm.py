"""vLLM's KV pool from a model and what the server tells: by vLLM's own rules, proven where it can.

Holds the guesses at what it does not tell (its dtype, parallel sizes, batch), and the figures of
its own that confirm or refute them. The rules are `planning.vllm`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ullage.anatomy.spec import ModelSpec
from ullage.costs.deployment import Deployment, Parallel, Platform
from ullage.costs.hardware import HardwareSpec
from ullage.costs.kv import layers_kv
from ullage.errors import BadInput
from ullage.planning.vllm import VERIFIED, Allocation, allocate
from ullage.telemetry.kv_pool import Asked, Pool, Unsure

PROBE_BYTES = 1 << 40
"""Any size tells the bytes of a block; this one holds one of every model."""
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda")
RULES = "vLLM 0.32's rules"
DTYPES = (None, "bfloat16", "float16", "float32")
"""What --dtype may be; None: as the model's configuration has it."""
TENSORS = (1, 2, 4, 8, 16, 32)
MOST_KEPT = 8
MOST_BATCHED = 1 << 17
"""Above any --max-num-batched-tokens: a pool of windows does not change beyond max_model_len."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Flags that the server does not tell, and what the rules make of them."""

    flags: Deployment
    made: Allocation

    @property
    def ranks(self) -> int:
        return self.flags.parallel.tensor * self.flags.parallel.pipeline

    @property
    def block_bytes(self) -> int:
        return self.made.bytes_per_block * self.ranks


def vllm_pool(rules: Rules, asked: Asked, deployment: Deployment | None) -> Pool:
    """Raises Unsure, or BadInput for formats that have no rule."""
    if not asked.num_blocks or asked.num_blocks % asked.num_engines:
        raise Unsure("the server does not tell how many KV blocks each of its engines has")
    if asked.skipped:
        raise Unsure(f"the layers {asked.skipped} keep KV in another format than the rest")
    if asked.state_formats and any(row.state_bytes for row in layers_kv(rules.spec)):
        raise Unsure(f"its recurrent states are kept in {asked.state_formats}")
    each = asked.num_blocks // asked.num_engines
    if deployment is not None:
        made = rules.agreed(asked, deployment, (deployment.platform,), each)
        return _pool(Guess(deployment, made), asked, "", sure=asked.budget_bytes is not None)
    fitting = _fitting(rules, asked, each)
    # What its memory and blocks bear out may be borne out by other flags as well.
    alone = len({guess.block_bytes for guess in fitting}) == 1 and asked.budget_bytes is not None
    taken = _taken(rules.spec, asked, fitting[0], alone)
    return _pool(fitting[0], asked, taken, sure=alone)


def _fitting(rules: Rules, asked: Asked, each: int) -> list[Guess]:
    """The usual flags, or where the server tells its memory all that come to its blocks."""
    found: list[Guess] = []
    why = ""
    for flags in _guesses(asked):
        try:
            found.append(Guess(flags, rules.agreed(asked, flags, PLATFORMS, each)))
        except (Unsure, BadInput) as error:
            why = why or str(error)
    if not found:
        raise Unsure(why)
    return found


def _guesses(asked: Asked) -> Iterator[Deployment]:
    """The likeliest first."""
    if asked.budget_bytes is None:
        yield Deployment()
        return
    for dtype in DTYPES:
        for tensor in TENSORS:
            yield Deployment(dtype=dtype, parallel=Parallel(tensor=tensor))


def _pool(guess: Guess, asked: Asked, taken: str, *, sure: bool) -> Pool:
    made = guess.made
    assert asked.num_blocks is not None
    at = f"{guess.ranks} ranks × " if guess.ranks > 1 else ""
    kept = made.dtype if made.kv_cache_dtype == "auto" else made.kv_cache_dtype
    source = (
        f"num_gpu_blocks × {at}{made.bytes_per_block:,} bytes of a block of this model in "
        f"{kept}, by {RULES}{taken}"
    )
    tokens = None if made.kv_cache_tokens is None else made.kv_cache_tokens * asked.num_engines
    if asked.max_model_len is None and len(made.groups) > 1:
        tokens = None
    return Pool(
        total_bytes=asked.num_blocks * guess.block_bytes,
        # Usage is a share of all blocks but the null block (vLLM 0.32, v1/core/block_pool.py).
        usable_bytes=(asked.num_blocks - asked.num_engines) * guess.block_bytes,
        tokens=tokens,
        source=source,
        sure=sure and made.basis == VERIFIED,
    )


def _taken(spec: ModelSpec, asked: Asked, guess: Guess, alone: bool) -> str:
    """What was supposed, in words; `alone` where nothing else comes to what the server tells."""
    tensor, dtype = guess.flags.parallel.tensor, guess.flags.dtype
    parts = [f"--tensor-parallel-size {tensor}"]
    if guess.made.kv_cache_dtype == "auto":
        parts.insert(0, f"--dtype {dtype}" if dtype else "the dtype of the model's configuration")
    taken = f"; taken: {' and '.join(parts)}"
    if alone:
        return f"{taken}, which its memory and blocks bear out"
    alike = _alike(spec, asked, guess.made.dtype)
    ranks = (
        f"up to {alike} ranks hold as many bytes together" if alike > 1 else "each further rank "
        "holds as many again"
    )  # fmt: skip
    if asked.budget_bytes is not None:
        return f"{taken}, which its memory and blocks allow, as they do others ({ranks})"
    return f"{taken}, which the server does not tell ({ranks})"


def _alike(spec: ModelSpec, asked: Asked, dtype: str) -> int:
    """On how many tensor-parallel ranks all of them together keep what one alone would."""
    kept = asked.format or "auto"

    def together(tensor: int) -> list[tuple[int, ...]]:
        rows = layers_kv(spec, Parallel(tensor=tensor), kept, dtype)
        return [(tensor * row.token_bytes, tensor * row.window_token_bytes,
                 tensor * row.state_bytes) for row in rows]  # fmt: skip

    one, alike = together(1), 1
    for tensor in TENSORS[1:]:
        if together(tensor) != one:
            break
        alike = tensor
    return alike


# --- by the rules ---------------------------------------------------------------------------------


class Rules:
    """vLLM's rules for one model. It remembers which sizes of batches explained a server."""

    def __init__(self, spec: ModelSpec, hardware: HardwareSpec | None = None) -> None:
        self.spec = spec
        self._hardware = hardware
        self._batched: list[int] = []

    def agreed(
        self, asked: Asked, flags: Deployment, platforms: tuple[Platform, ...], num_blocks: int
    ) -> Allocation:
        """vLLM's allocation with the server's block size and tokens; one, whatever it runs on."""
        made, why = [], []
        for platform in platforms:
            try:
                one, reason = self._explained(asked, replace(flags, platform=platform), num_blocks)
            except BadInput as error:
                why.append(str(error))
                continue
            if reason:
                why.append(reason)
            else:
                made.append(one)
        if not made:
            raise Unsure("; ".join(dict.fromkeys(why)))
        if len({one.bytes_per_block for one in made}) > 1:
            raise Unsure("the bytes of a block depend on what the server runs on")
        return made[0]

    def _explained(
        self, asked: Asked, flags: Deployment, num_blocks: int
    ) -> tuple[Allocation, str]:
        """(what the rules make of the flags, why that is not what the server allocated or "")."""
        flags = replace(
            flags,
            max_model_len=asked.max_model_len or flags.max_model_len,
            kv_cache_memory_bytes=None,
            kv_cache_dtype=asked.format or flags.kv_cache_dtype,
            block_size=asked.block_size if asked.block_size_is_flag else flags.block_size,
            enable_prefix_caching=asked.prefix_caching,
        )
        probe = allocate(self.spec, flags, PROBE_BYTES, hardware=self._hardware)
        if not probe.bytes_per_block:
            raise Unsure("this model keeps nothing that grows in a KV cache")
        budget = num_blocks * probe.bytes_per_block

        def made_of(batched: int | None) -> Allocation:
            named = flags
            if batched is not None:
                named = replace(flags, max_num_batched_tokens=batched, max_num_seqs=1)
            return allocate(self.spec, named, budget, hardware=self._hardware)

        made = made_of(None)
        reason = _differs(made, asked)
        beyond = _beyond_its_memory(made, asked, num_blocks)
        windows = any(row.window for row in layers_kv(self.spec))
        if beyond or not reason or not windows or flags.max_num_batched_tokens is not None:
            return made, reason or beyond
        # A window holds the batch beside it, and how large that is the server does not tell.
        for batched in self._batched:
            one = made_of(batched)
            if not _differs(one, asked):
                return one, ""
        found = _batch_that_explains(made_of, asked)
        if found is None or _differs(one := made_of(found), asked):
            return made, reason
        self._batched[:] = [found, *self._batched][:MOST_KEPT]
        return one, ""


def _beyond_its_memory(made: Allocation, asked: Asked, num_blocks: int) -> str:
    """Why the memory that it was given does not come to its blocks; "" where it does."""
    if asked.budget_bytes is None:
        return ""
    held = asked.budget_bytes // made.bytes_per_block
    if held == num_blocks:
        return ""
    return (
        f"{asked.budget_bytes:,} bytes hold {held:,} blocks of this model, and the server has "
        f"{num_blocks:,}: another model, dtype or parallel size"
    )


def _batch_that_explains(made_of: Callable[[int], Allocation], asked: Asked) -> int | None:
    """The largest batch with which the pool holds as many tokens as the server says."""
    if asked.total_tokens is None:
        return None
    low, high = 0, MOST_BATCHED  # more tokens in flight leave room for fewer requests
    while low < high:
        middle = (low + high + 1) // 2
        tokens = (made_of(middle).kv_cache_tokens or 0) * asked.num_engines
        low, high = (middle, high) if tokens >= asked.total_tokens else (low, middle - 1)
    return low or None


def _differs(made: Allocation, asked: Asked) -> str:
    """Why this is not what the server allocated; "" when its own figures do not contradict."""
    if made.basis == "unsupported":
        return "; ".join(made.warnings)
    if made.refusals:
        return f"{RULES} would not start it: {made.refusals[0]}"
    if asked.block_size is not None and made.block_size != asked.block_size:
        return (
            f"a block would have {made.block_size} tokens and the server's has {asked.block_size}"
        )
    if asked.total_tokens is None or asked.max_model_len is None:
        return ""
    tokens = (made.kv_cache_tokens or 0) * asked.num_engines
    if tokens == asked.total_tokens:
        return ""
    return (
        f"the server's blocks would hold {tokens:,} tokens of this model and it says "
        f"{asked.total_tokens:,.0f}: it serves another model or with other flags"
    )

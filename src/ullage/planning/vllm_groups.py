"""How vLLM 0.32 groups layers into one shared pool of blocks.

Holds get_kv_cache_groups and what it calls (vllm/v1/core/kv_cache_utils.py) as functions of
pages; the pages are `vllm_pages.py`, how many blocks a budget buys is `vllm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from ullage.planning.vllm_pages import Page, round_up

FULL = ("full", "mla")
"""Kinds that need a block for every token: they may share a group whatever their page sizes."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One cache of the model: the pipeline rank that holds it, and its page."""

    rank: int
    page: Page


@dataclass(frozen=True, slots=True)
class Group:
    """Caches that share one block table. `slots` keep their own pages; `block_size` is common."""

    slots: tuple[Slot, ...]

    @property
    def block_size(self) -> int:
        return self.slots[0].page.block_size

    def on_rank(self, rank: int) -> Group:
        return Group(tuple(slot for slot in self.slots if slot.rank == rank))

    def blocks_per_request(self, max_model_len: int, in_flight: int, *, aligned: bool) -> int:
        """Blocks of this group's table that one longest request takes."""
        pages = {slot.page for slot in self.slots}
        return max(p.blocks_per_request(max_model_len, in_flight, aligned=aligned) for p in pages)


class Ungroupable(Exception):
    """vLLM refuses the model: no common page size can be found. `str()` says why."""


def group_slots(
    slots: Sequence[Slot], *, hybrid_manager: bool, block_outermost: bool
) -> tuple[Group, ...]:
    """The groups of the whole model, over all pipeline ranks.

    `hybrid_manager` False makes every windowed or chunked layer keep all tokens when the model has
    full layers too. `block_outermost` is the memory layout that packs pages of unequal size.
    Raises Ungroupable.
    """
    if not slots:
        return ()
    if not hybrid_manager:
        slots = _promote(slots)
    pages = [slot.page for slot in slots]
    if _one_group(pages):
        return (_merged(slots) if _mergeable(pages) else Group(tuple(slots)),)
    if block_outermost and len({slot.page.page_bytes for slot in slots}) > 1:
        return _packed(slots)
    try:
        return _equal_sized(_unify_page_bytes(slots))
    except Ungroupable:
        kinds = {slot.page.kind for slot in slots}
        if not {"mla", "window"} <= kinds or kinds & {"window_mla", "chunk"}:
            raise
        # Windows beside latents of an odd size are kept in full instead, if that is uniform.
        return (Group(tuple(_promote(slots))),)


def bytes_per_block(groups: Sequence[Group], *, block_outermost: bool) -> int:
    """Bytes of one block over all layers of one rank: the widest group's (groups overlay)."""
    if not block_outermost:
        return max(
            sum(round_up(s.page.page_bytes, s.page.stride_alignment) for s in group.slots)
            for group in groups
        )
    widest = max(sum(s.page.page_bytes for s in group.slots) for group in groups)
    alignments = {s.page.stride_alignment for group in groups for s in group.slots}
    return round_up(widest, lcm(*alignments))


# --- one group -----------------------------------------------------------------------------------


def _one_group(pages: Sequence[Page]) -> bool:
    """Whether all layers share one block table. Raises Ungroupable where vLLM's check raises."""
    if pages[0].kind == "full" and all(page.kind in FULL for page in pages):
        bounds = {page.bound for page in pages}
        if sum(b > 0 for b in bounds) > 1 or sum(b < 0 for b in bounds) > 1:
            raise Ungroupable("full attention with windows of several sizes cannot share a group")
    return _mergeable(pages) or _uniform(pages)


def _mergeable(pages: Sequence[Page]) -> bool:
    """Whether all pages can be described by one spec (the `merge` of their class)."""
    first = pages[0]
    if first.kind == "full":
        # A promoted window or chunk merges with plain full attention, not with another bound.
        if len({page.bound for page in pages if page.bound}) > 1:
            return False
        return all(replace(p, bound=0) == replace(first, bound=0) for p in set(pages))
    if first.kind == "window_mla":
        # Their merge does not ask for equal sizes; the first one's then holds for all.
        return all(
            (p.kind, p.bound, p.tokens_per_state)
            == ("window_mla", first.bound, first.tokens_per_state)
            for p in set(pages)
        )
    return all(page == first for page in set(pages))


def _merged(slots: Sequence[Slot]) -> Group:
    """One group whose layers all take the first one's page."""
    return Group(tuple(replace(slot, page=slots[0].page) for slot in slots))


def _uniform(pages: Sequence[Page]) -> bool:
    """Whether all pages always need the same number of blocks (is_uniform_type)."""
    first = pages[0]
    distinct = set(pages)
    if any(page.block_size != first.block_size for page in distinct):
        return False
    match first.kind:
        case "full" | "mla":
            return all(page.kind in FULL for page in distinct)
        case "window":
            # A latent window is a window too when the plain one is asked first.
            kinds = ("window", "window_mla")
            return all(p.kind in kinds and p.bound == first.bound for p in distinct)
        case "state":
            return all(
                p.kind == "state"
                and p.page_bytes == first.page_bytes
                and p.extra_states == first.extra_states
                for p in distinct
            )
        case kind:
            return all(p.kind == kind and p.bound == first.bound for p in distinct)


def _in_full(page: Page, block: int, local: tuple[str, ...]) -> Page:
    """A local layer's page kept for all tokens; a chunk's bound turns negative, since windows and
    chunks of one size are still not alike."""
    if page.kind not in local:
        return page
    bound = -page.bound if page.kind == "chunk" else page.bound
    return replace(page, kind="full", block_size=block or page.block_size, bound=bound)


def _promote(slots: Sequence[Slot]) -> list[Slot]:
    """Windowed and chunked layers kept in full, as without the hybrid cache manager."""
    pages = [slot.page for slot in slots]
    if _one_group(pages):
        return list(slots)
    full_blocks = {page.block_size for page in pages if page.kind in FULL}
    block = full_blocks.pop() if len(full_blocks) == 1 else 0
    local = ("window", "chunk") if any(page.kind in FULL for page in pages) else ()
    promoted = [replace(slot, page=_in_full(slot.page, block, local)) for slot in slots]
    if not _uniform([slot.page for slot in promoted]):
        raise Ungroupable("local attention layers cannot be kept as full attention here")
    return promoted


# --- groups of equal pages -----------------------------------------------------------------------


def _unify_page_bytes(slots: Sequence[Slot]) -> list[Slot]:
    """Give every layer the largest page: by more tokens where that divides, else by padding."""
    largest = max(slot.page.page_bytes for slot in slots)

    def unified(page: Page) -> Page:
        if page.page_bytes == largest:
            return page
        if page.kind == "state":
            return replace(page, padded_bytes=largest)
        ratio, rest = divmod(largest, page.page_bytes)
        if rest == 0 and not page.padded_bytes:
            return replace(page, block_size=page.block_size * ratio)
        if page.kind == "mla":
            raise Ungroupable(
                f"a page of latent attention of {page.page_bytes} bytes neither divides the "
                f"largest page of {largest} bytes nor can be padded"
            )
        return replace(page, padded_bytes=largest)

    memo = {page: unified(page) for page in {slot.page for slot in slots}}
    return [replace(slot, page=memo[slot.page]) for slot in slots]


def _equal_sized(slots: Sequence[Slot]) -> tuple[Group, ...]:
    """Groups of one kind with as many layers as the rarest kind has (or the commonest, when they
    are within a factor 1.5), dealt out in turn so that every pipeline rank gets its share."""
    buckets = _buckets(slots)
    sizes = [len(bucket) for bucket in buckets]
    size = max(sizes) if max(sizes) < min(sizes) * 1.5 else min(sizes)
    groups: list[Group] = []
    for bucket in buckets:
        count = -(-len(bucket) // size)
        groups.extend(_merged(bucket[i::count]) for i in range(count))
    return tuple(groups)


def _buckets(slots: Sequence[Slot]) -> list[list[Slot]]:
    by_page: dict[Page, list[Slot]] = {}
    for slot in slots:
        by_page.setdefault(slot.page, []).append(slot)
    buckets: list[tuple[list[Page], list[Slot]]] = []
    for page, members in by_page.items():
        for pages, bucket in buckets:
            if _mergeable([*pages, page]):
                pages.append(page)
                bucket.extend(members)
                break
        else:
            buckets.append(([page], list(members)))
    return [bucket for _, bucket in buckets]


# --- pages of unequal size, packed side by side --------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers of one type; `balanced` when every page size occurs equally often in it."""

    slots: tuple[Slot, ...]
    by_size: dict[int, list[Slot]]

    @property
    def repeats(self) -> int:
        return max(len(members) for members in self.by_size.values())

    @property
    def balanced(self) -> bool:
        return len({len(members) for members in self.by_size.values()}) == 1

    def widest(self, count: int) -> int:
        return sum(-(-len(members) // count) * size for size, members in self.by_size.items())


def _packed(slots: Sequence[Slot]) -> tuple[Group, ...]:
    """Groups whose layers' pages lie side by side in each block (_get_packed_kv_cache_groups)."""
    gathered: list[list[Slot]] = []
    for slot in slots:
        for members in gathered:
            if _uniform([members[0].page, slot.page]):  # each was compared with the first
                members.append(slot)
                break
        else:
            gathered.append([slot])
    buckets = [_bucket(members) for members in gathered]

    floor = max((b.repeats for b in buckets if b.balanced and len(b.by_size) > 1), default=0)
    repeats = _least_padding([b.repeats for b in buckets if b.balanced], floor) if floor else 0

    def split(bucket: _Bucket) -> int:
        return -(-bucket.repeats // repeats) if bucket.balanced and repeats else 1

    def is_state(bucket: _Bucket) -> bool:
        kind = bucket.slots[0].page.kind
        return kind == "state" or (not repeats and kind in ("window", "window_mla"))

    anchor = max(b.widest(len(b.slots) if is_state(b) else split(b)) for b in buckets)
    groups: list[Group] = []
    for bucket in buckets:
        count = split(bucket)
        if is_state(bucket):
            per_block = max(anchor // bucket.slots[0].page.page_bytes, 1)
            count = max(count, -(-len(bucket.slots) // per_block))
        if count == 1:
            groups.append(Group(bucket.slots))
            continue
        if not bucket.balanced:
            # vLLM pairs layers of each page size here and loses those without a partner, which
            # its own check ("some layers are not assigned to any group") then refuses.
            raise Ungroupable("window layers of unequal number per page size cannot be packed")
        pattern = list(zip(*bucket.by_size.values(), strict=True))
        groups.extend(
            Group(tuple(slot for repeat in pattern[i::count] for slot in repeat))
            for i in range(count)
        )
    return tuple(groups)


def _bucket(members: list[Slot]) -> _Bucket:
    by_size: dict[int, list[Slot]] = {}
    for slot in members:
        by_size.setdefault(slot.page.page_bytes, []).append(slot)
    return _Bucket(tuple(members), by_size)


def _least_padding(counts: Sequence[int], floor: int) -> int:
    """The group size from `floor` up that pads the counts least; of equals the largest."""
    if floor > max(counts):
        return floor

    def padding(size: int) -> int:
        return sum(-count % size for count in counts)

    return min(range(floor, max(counts) + 1), key=lambda size: (padding(size), -size))

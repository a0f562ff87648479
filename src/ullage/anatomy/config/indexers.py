"""Indexers: the small scorers that pick which keys sparse attention sees, in every spelling.

Reads their sizes only; the attention beside them is `mixers.py`.
"""

from __future__ import annotations

from ullage.anatomy.config.keys import MAX_HEADS, MAX_WIDTH, Section
from ullage.anatomy.spec import Indexer


def block_index(section: Section, kind: str) -> Indexer | None:
    if kind == "indexed":
        return _nested_or_flat(section)
    if section.has("indexer_head_dim"):
        return _token_budget_index(section)
    if section.knows("index_block_size"):  # of no consequence to the layers without an indexer
        section.ignore(
            "index_n_heads",
            "index_head_dim",
            "index_block_size",
            "index_topk_blocks",
            "index_local_blocks",
        )
    return None


def _token_budget_index(section: Section) -> Indexer:
    """Qwen4-Exp: blocks of indexer_compress_ratio keys within a budget of tokens."""
    block = section.integer("indexer_compress_ratio", maximum=MAX_WIDTH)
    budget = section.integer("indexer_budget")
    if budget % block:
        raise section.error("indexer_budget", budget, f"a multiple of the blocks of {block}")
    kv_heads = section.integer("indexer_kv_heads", maximum=MAX_HEADS)
    if kv_heads != 1:
        raise section.error("indexer_kv_heads", kv_heads, "1")
    return Indexer(
        num_heads=section.integer("indexer_n_heads", maximum=MAX_HEADS),
        head_dim=section.integer("indexer_head_dim", maximum=MAX_WIDTH),
        topk=budget // block,
        block=block,
    )


def _nested_or_flat(section: Section) -> Indexer:
    """MiniMax-M3's block indexer beside plain attention, nested or in transformers' flat keys."""
    nested = section.section("sparse_attention_config")
    if nested is None:
        section.ignore("index_local_blocks")
        return Indexer(
            num_heads=section.integer("index_n_heads", maximum=MAX_HEADS),
            head_dim=section.integer("index_head_dim", maximum=MAX_WIDTH),
            topk=section.integer("index_topk_blocks"),
            block=section.integer("index_block_size"),
        )
    return Indexer(
        num_heads=nested.integer("sparse_num_index_heads", maximum=MAX_HEADS),
        head_dim=nested.integer("sparse_index_dim", maximum=MAX_WIDTH),
        topk=nested.integer("sparse_topk_blocks"),
        block=nested.integer("sparse_block_size"),
    )


def read_indexer(section: Section) -> Indexer | None:
    """The sparse indexer of DeepSeek-V3.2 and GLM-5, or None when index_topk is absent."""
    topk = section.optional_integer("index_topk")
    if topk is None:
        return None
    section.ignore("indexer_rope_interleave")
    head_dim = section.integer("index_head_dim", maximum=MAX_WIDTH)
    return Indexer(
        num_heads=section.integer("index_n_heads", maximum=MAX_HEADS),
        head_dim=head_dim,
        topk=topk,
        kept=_pooled_keys(section, head_dim),
    )


def _pooled_keys(section: Section, head_dim: int) -> int | None:
    """GLM-5 Next scores pools of index_kpool keys: an engine may keep the pools alone.

    transformers 5.24 (glm5_next) keeps every key, its gate and a flag.
    """
    pool = section.optional_integer("index_kpool")
    section.ignore("index_kpool_always_select_tail")
    if pool is None:
        return None
    return section.reading.decide(
        section.field("index_kpool"),
        f"keys pooled {pool} to one, kept pooled or whole",
        likely=2 * head_dim + 1,
        low=-(-head_dim // pool),
        high=2 * head_dim + 1,
        widens=("kv",),
    )

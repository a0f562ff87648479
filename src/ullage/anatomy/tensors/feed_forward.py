"""The tensors of dense feed-forwards and of mixtures of experts, in every layout on disk.

Functions that write into a `Writer`; which layout a family uses is in `naming/rows.py`.
"""

from __future__ import annotations

from ullage.anatomy.spec import Dense, Experts, FeedForward, LinearFeedForward, NoFeedForward
from ullage.anatomy.tensors.tensor import Role
from ullage.anatomy.tensors.writer import Writer

# --- feed-forward ----------------------------------------------------------------------------


def feed_forward(w: Writer, ff: FeedForward) -> None:
    match ff:
        case Dense():
            dense(w, ff)
            w.extras("dense")
        case Experts():
            experts(w, ff)
        case LinearFeedForward():
            w.linear(w.paths["mlp"], w.spec.hidden_size, w.spec.hidden_size, "up",
                        "replicated", bias=ff.bias)  # fmt: skip
        case NoFeedForward():
            pass


def dense(w: Writer, ff: Dense, slot: str = "") -> None:
    hidden, width, paths = w.spec.hidden_size, ff.intermediate, w.paths
    if ff.gated and f"{slot}gate_up" in paths:
        w.linear(paths[f"{slot}gate_up"], 2 * width, hidden, "gate_up", "column", bias=ff.bias)
    else:
        if ff.gated:
            w.linear(paths[f"{slot}gate"], width, hidden, "gate", "column", bias=ff.bias)
        up = paths[f"{slot}up"]
        if not ff.gated:
            up = paths.get(f"{slot}up_plain", up)
        w.linear(up, width, hidden, "up", "column", bias=ff.bias)
    w.linear(paths[f"{slot}down"], hidden, width, "down", "row", bias=ff.bias)


def experts(w: Writer, ff: Experts) -> None:
    hidden, paths, num = w.spec.hidden_size, w.paths, ff.num_experts
    routed = num + ff.zero_experts
    w.linear(paths["router"], routed, ff.router_width or hidden, "router", "replicated",
             bias=ff.router_bias, held_dtype=w.naming.router_held)  # fmt: skip
    if ff.hash_routed:
        w.tensor(paths["hash_table"], (w.spec.vocab_size, ff.top_k), "hash_table",
                    suffix="", dtype="int64")  # fmt: skip
    if ff.score_correction_bias:
        path = paths["router_bias"]
        suffix = ".bias" if path.endswith(".bias") else ""
        shape = (1, routed) if w.naming.router_bias_row else (routed,)
        w.tensor(path.removesuffix(".bias"), shape, "bias", suffix=suffix, dtype="float32")
    width = ff.latent or hidden
    if ff.latent:
        w.linear(paths["latent_in"], width, hidden, "latent", "replicated")
    if w.naming.experts == "each":
        each_expert(w, ff, width)
    else:
        stacked_experts(w, ff, width)
    if ff.latent:
        w.linear(paths["latent_out"], hidden, width, "latent", "replicated")
    if ff.shared_intermediate:
        shared_expert(w, ff)
    w.extras("experts")


def each_expert(w: Writer, ff: Experts, width: int) -> None:
    paths, inner = w.paths, ff.intermediate
    parts: list[tuple[str, tuple[int, int], Role, int]] = [
        (paths["e_up"], (inner, width), "expert_up", 0),
        (paths["e_down"], (width, inner), "expert_down", 1),
    ]
    if ff.gated:
        parts.insert(0, (paths["e_gate"], (inner, width), "expert_gate", 0))
    for path, shape, role, cut in parts:
        w.tensor(path, shape, role, "expert", cut=cut, count=ff.num_experts,
                    quantizable=True, in_dim=1)  # fmt: skip
        if ff.bias:
            w.tensor(path, (shape[0],), "expert_bias", "expert", suffix=".bias",
                        cut=0 if cut == 0 else None, count=ff.num_experts)  # fmt: skip


def stacked_experts(w: Writer, ff: Experts, width: int) -> None:
    paths, num, inner, layout = w.paths, ff.num_experts, ff.intermediate, w.naming.experts
    parts: list[tuple[str, int, int, Role, bool]] = []  # path, out, in, role, cut along out
    if not ff.gated:
        parts.append((paths["e_all_up"], inner, width, "expert_up", True))
    elif layout == "stacked_split":
        parts.append((paths["e_gate_up"], inner, width, "expert_gate", True))
        parts.append((paths["e_all_up"], inner, width, "expert_up", True))
    else:
        parts.append((paths["e_gate_up"], 2 * inner, width, "expert_gate_up", True))
    parts.append((paths["e_all_down"], width, inner, "expert_down", False))
    in_out = layout == "stacked_in_out"
    for path, rows, columns, role, along_out in parts:
        shape = (num, columns, rows) if in_out else (num, rows, columns)
        w.tensor(path, shape, role, "expert", suffix=paths["stacked_suffix"],
                    cut=1 if along_out != in_out else 2, quantizable=True,
                    in_dim=1 if in_out else 2, num_experts=num)  # fmt: skip
        if ff.bias:
            w.tensor(path, (num, rows), "expert_bias", "expert", num_experts=num,
                        suffix=paths["stacked_bias"], cut=1 if along_out else None)  # fmt: skip


def shared_expert(w: Writer, ff: Experts) -> None:
    hidden, width, paths = w.spec.hidden_size, ff.shared_intermediate, w.paths
    whole = w.naming.sequence_parallel
    if ff.gated and "s_gate_up" in paths:
        w.linear(
            paths["s_gate_up"], 2 * width, hidden, "shared_gate_up", "column", bias=ff.shared_bias,
            sequence_whole=whole,
        )  # fmt: skip
    else:
        if ff.gated:
            w.linear(paths["s_gate"], width, hidden, "shared_gate", "column", bias=ff.shared_bias,
                     sequence_whole=whole)  # fmt: skip
        w.linear(paths["s_up"], width, hidden, "shared_up", "column", bias=ff.shared_bias,
                 sequence_whole=whole)  # fmt: skip
    w.linear(paths["s_down"], hidden, width, "shared_down", "row", bias=ff.shared_bias,
             sequence_whole=whole)  # fmt: skip
    if ff.shared_gate:
        w.linear(paths["shared_gate"], 1, hidden, "shared_router", "replicated")

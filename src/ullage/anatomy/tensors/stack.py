"""The tensors of one stack of layers, in the order of the forward pass.

Holds embeddings, heads and the frame of a layer; mixers and feed-forwards are `mixers.py` and
`feed_forward.py`, single tensors `writer.py`.
"""

from __future__ import annotations

from ullage.anatomy.spec import Attention, LayerSpec, NoFeedForward, NoMixer
from ullage.anatomy.tensors.feed_forward import dense, feed_forward
from ullage.anatomy.tensors.mixers import attention, mixer_tensors
from ullage.anatomy.tensors.sizes import size_of
from ullage.anatomy.tensors.writer import Writer

# --- outside the layers ----------------------------------------------------------------------


def positions(w: Writer, positions: object) -> None:
    rows = getattr(positions, "table_rows", 0)
    kind = getattr(positions, "kind", "none")
    if rows and kind in ("learned", "sinusoidal"):
        width = w.spec.hidden_size
        if w.spec.kind == "encoder":
            width = w.spec.embedding_size or width
        w.tensor(w.paths["positions"], (rows, width), "position")
    if w.spec.embedding_norm:
        width = w.spec.hidden_size
        if w.spec.kind == "encoder":
            width = w.spec.embedding_size or width
        w.norm(w.paths["embed_norm"], width)


def embeddings(w: Writer) -> None:
    spec = w.spec
    width = spec.embedding_size or spec.hidden_size
    rows = spec.vocab_size + (size_of(str(w.naming.embed_extra), w.sizes) or 0)
    w.tensor(w.paths["embed"], (rows, width), "embed", "vocab", cut=0, in_dim=1)
    if spec.token_types:
        w.tensor(w.paths["token_types"], (spec.token_types, width), "position")
    positions(w, spec.positions)
    if width != spec.hidden_size:
        bias = spec.kind == "encoder"
        w.linear(w.paths["project_in"], spec.hidden_size, width, "embed", "replicated",
                    bias=bias)  # fmt: skip
    if spec.per_layer_input:
        vocab, ple = spec.per_layer_input
        every = ple * len(spec.layers)
        w.tensor(w.paths["ple_embed"], (vocab, every), "per_layer", "vocab", cut=0)
        w.linear(w.paths["ple_projection"], every, spec.hidden_size, "per_layer",
                    "replicated")  # fmt: skip
        w.norm(w.paths["ple_norm"], ple)
    if spec.residual_streams > 1:
        hyper(w, w.paths["hyper_head"], spec.residual_streams, 1)
    w.extras("model")


def final_norm(w: Writer) -> None:
    if w.spec.final_norm:
        w.norm(w.paths["final_norm"], w.spec.hidden_size)


def head(w: Writer) -> None:
    spec = w.spec
    width = spec.embedding_size or spec.hidden_size
    if width != spec.hidden_size and spec.kind != "encoder" and spec.judges is None:
        w.linear(w.paths["project_out"], width, spec.hidden_size, "lm_head", "replicated")
    if spec.judges is not None:
        w.extras(spec.judges)
        return
    if not spec.lm_head:
        if spec.architecture.endswith("Model"):
            w.extras("bare")
        return
    w.extras("head")
    if w.naming.own_head:
        return
    path = w.paths["lm_head"]
    if not spec.tie_embeddings:
        w.tensor(path, (spec.vocab_size, width), "lm_head", "vocab", cut=0, quantizable=True,
                    in_dim=1)  # fmt: skip
    if spec.lm_head_bias:
        bias = w.paths["lm_head_bias"].removesuffix(".bias")
        w.tensor(bias, (spec.vocab_size,), "bias", "vocab", suffix=".bias", cut=0)


def mtp_layers(w: Writer) -> None:
    spec = w.spec
    if not spec.mtp_layers:
        return
    w.named = w.naming.known and w.naming.mtp is not None
    path = w.naming.mtp or w.paths["layer"]
    first = len(spec.layers) if w.naming.mtp_from_end or w.naming.mtp is None else 0
    w.extras("mtp")
    for number, layer in enumerate(spec.mtp_layers):
        w.begin_layer(layer, path.replace("{i}", str(first + number)) + ".", first=False)
        one_layer(w, layer)
        w.extras("mtp_layer")
    w.end_layers()


# --- a layer ---------------------------------------------------------------------------------


def layers(w: Writer, layers: tuple[LayerSpec, ...]) -> None:
    paths = _layer_paths(w, sum(layer.weights_from is None for layer in layers))
    number = -1
    for layer in layers:
        stored = layer.weights_from is None
        number += stored
        w.begin_layer(layer, paths[number], first=number == 0)
        if stored:
            one_layer(w, layer, first=number == 0)
        w.extras("run")
    w.end_layers()


def _layer_paths(w: Writer, count: int) -> list[str]:
    """The prefix of each of `count` stored layers."""
    before, after = w.paths["layer"].split("{i}")
    paths = [
        path.replace("{i}", str(i)) + "."
        for path, size in w.naming.parts
        for i in range(w.sizes.get(size, 0) or count // len(w.naming.parts))
    ]
    return paths + [f"{before}{i}{after}." for i in range(len(paths), count)]


def one_layer(w: Writer, layer: LayerSpec, *, first: bool = False) -> None:
    spec, hidden = w.spec, w.spec.hidden_size
    place = spec.norm.place
    has_mixer = not isinstance(layer.mixer, NoMixer)
    has_ff = not isinstance(layer.feed_forward, NoFeedForward)
    parallel = place == "parallel"
    before = place in ("pre", "sandwich", "parallel")
    after = place in ("post", "sandwich")
    both = parallel and (spec.norm.beside or w.naming.parallel_norms == 2)
    beside = "_beside" if spec.norm.beside and "pre1_beside" in w.paths else ""
    if has_mixer and before and (w.naming.first_norm or not first):
        seen = layer.mixer.input_size if isinstance(layer.mixer, Attention) else None
        w.norm(w.paths["pre1" + beside], seen or hidden)
    mixer_tensors(w, layer.mixer)
    if has_mixer and after:
        w.norm(w.paths["post1"], hidden)
    if relative_rows(w) and (first or w.naming.relative_everywhere):
        rows = relative_rows(w)
        heads = layer.mixer.num_heads if isinstance(layer.mixer, Attention) else 1
        w.tensor(w.paths["relative_bias"], (rows, heads), "attn_bias_table", "column",
                    cut=1)  # fmt: skip
    if layer.cross_attention is not None:
        w.norm(w.paths["cross_norm"], hidden)
        attention(w, layer.cross_attention, cross="cross_")
        w.extras("cross")
    if has_ff and before and (not parallel or both):
        w.norm(w.paths["pre2" + beside], hidden)
    feed_forward(w, layer.feed_forward)
    if layer.parallel_dense is not None:
        dense(w, layer.parallel_dense, "dense_")
    if has_ff and after:
        w.norm(w.paths["post2"], hidden)
    if spec.per_layer_input and w.stack == "decoder":
        width = spec.per_layer_input[1]
        w.linear(w.paths["ple_gate"], width, hidden, "per_layer", "replicated")
        w.linear(w.paths["ple_out"], hidden, width, "per_layer", "replicated")
        w.norm(w.paths["ple_post_norm"], hidden)
    if spec.residual_streams > 1:
        streams = spec.residual_streams
        mixed = w.naming.hyper_mixed
        for path in (w.paths["hyper_attn"], w.paths["hyper_ffn"]):
            hyper(w, path, (2 + streams if mixed else 2) * streams, 3 if mixed else 2)
    w.extras("layer")


def hyper(w: Writer, path: str, rows: int, scales: int) -> None:
    """Hyper-connections (DeepSeek-V4): a matrix over all residual streams, in float32."""
    if not path:
        return
    module, joint, stem = path.rpartition("." if "." in path else "_")
    width = w.spec.residual_streams * w.spec.hidden_size
    for leaf, shape in (("fn", (rows, width)), ("base", (rows,)), ("scale", (scales,))):
        w.tensor(module, shape, "hyper", suffix=joint + stem + leaf, dtype="float32")


def relative_rows(w: Writer) -> int:
    positions = w.spec.positions
    if w.stack == "encoder" and w.spec.encoder_positions is not None:
        positions = w.spec.encoder_positions
    return positions.table_rows if positions.kind == "relative" else 0

"""Stacks whose layers run more than once: shared groups, loops, cycles, shared blocks.

Each function takes the layers that are stored and gives those that run; a layer that runs another's
weights again says so (`weights_from`) and caches its own keys and values unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ullage.anatomy.config.keys import Section
from ullage.anatomy.spec import Attention, LayerSpec

MAX_RUNS = 4096
Layers = list[LayerSpec]


def _again(layer: LayerSpec, *, keeps_kv: bool = True) -> LayerSpec:
    """The same layer once more; without KV of its own it reads what the first run keeps."""
    mixer = layer.mixer
    if not keeps_kv and isinstance(mixer, Attention):
        mixer = replace(mixer, kv_shared_from=layer.index)
    return replace(layer, mixer=mixer, weights_from=layer.index)


def _numbered(layers: Layers) -> Layers:
    """Layers in the order they run, numbered; `weights_from` follows what it points at."""
    places: dict[int, int] = {}
    out: Layers = []
    for i, layer in enumerate(layers):
        held = layer.weights_from
        if held is None:
            places[layer.index] = i
        else:
            mixer = layer.mixer
            if isinstance(mixer, Attention) and mixer.kv_shared_from == held:
                layer = replace(layer, mixer=replace(mixer, kv_shared_from=places[held]))
            layer = replace(layer, weights_from=places[held])
        out.append(replace(layer, index=i))
    return out


def _limit(text: Section, name: str, runs: int) -> None:
    if runs > MAX_RUNS:
        raise text.error(name, text.values.get(name), f"at most {MAX_RUNS} layers that run")


def _groups(text: Section, layers: Layers) -> Layers:
    """ALBERT: num_hidden_groups sets of weights, each run by that many layers in a row."""
    groups = text.integer("num_hidden_groups", maximum=len(layers))
    text.ignore("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
    inner = text.integer("inner_group_num", 1, why="default: 1")
    if inner != 1:
        raise text.error("inner_group_num", inner, "1")
    first: dict[int, int] = {}
    out = []
    for i, layer in enumerate(layers):
        held = first.setdefault(i * groups // len(layers), i)
        out.append(layer if held == i else replace(layer, weights_from=held))
    return out


def _middle(text: Section, layers: Layers) -> Layers:
    """Dory: an opening, a middle run n_recurrent_loops times, an ending.

    With `last_loop` the earlier loops read the cache of the last one and keep none.
    """
    halves = 2 if "mlp" in (text.texts("layer_types") or ()) else 1  # each half of a layer counts
    opening = text.integer("n_input_layers", minimum=0) // halves
    ending = text.integer("n_output_layers", minimum=0) // halves
    middle = text.optional_integer("n_recurrent_layers", minimum=0)
    middle = len(layers) - opening - ending if middle is None else middle // halves
    if middle < 0 or opening + middle + ending != len(layers):
        raise text.error("n_recurrent_layers", middle, f"what is left of {len(layers)} layers")
    loops = text.integer("n_recurrent_loops")
    _limit(text, "n_recurrent_loops", opening + middle * loops + ending)
    mode = text.text("recurrent_kv_cache_mode", "per_loop", why="default: per_loop")
    if mode not in ("per_loop", "last_loop"):
        raise text.error("recurrent_kv_cache_mode", mode, "per_loop or last_loop")
    looped = layers[opening : opening + middle]
    again = [_again(layer, keeps_kv=mode == "per_loop") for layer in looped]
    return _numbered(layers[: opening + middle] + again * (loops - 1) + layers[opening + middle :])


def _passes(text: Section, layers: Layers) -> Layers:
    """Inkling 2 Loop: the layers of a range run loop_num_passes times; one KV each."""
    start = text.integer("loop_layer_index_start", minimum=0, maximum=len(layers))
    end = text.integer("loop_layer_index_end", minimum=start, maximum=len(layers))
    passes = text.integer("loop_num_passes")
    _limit(text, "loop_num_passes", len(layers) + (end - start) * (passes - 1))
    again = [_again(layer) for layer in layers[start:end]]
    return _numbered(layers[:end] + again * (passes - 1) + layers[end:])


def _cycles(text: Section, layers: Layers) -> Layers:
    """HRM: in each high cycle the low stack runs L_cycles times, then the high stack once."""
    high, low = text.integer("H_cycles"), text.integer("L_cycles")
    _limit(text, "H_cycles", high * (low + 1) * len(layers) // 2)
    half = len(layers) // 2
    first = layers[:half]
    again = [_again(layer) for layer in first]
    last = layers[half:]
    out = first + again * (low - 1) + last
    repeated = again * low + [_again(layer) for layer in last]
    return _numbered(out + repeated * (high - 1))


def _shared_blocks(text: Section, layers: Layers) -> Layers:
    """Zamba: the transformer layers take turns with num_mem_blocks sets of weights."""
    blocks = text.integer("num_mem_blocks", 1, why="default: one block", maximum=64)
    held: dict[int, int] = {}
    out: Layers = []
    count = 0
    for layer in layers:
        if isinstance(layer.mixer, Attention):
            first = held.setdefault(count % blocks, layer.index)
            count += 1
            if first != layer.index:
                layer = replace(layer, weights_from=first)
        out.append(layer)
    return out


LOOPS: dict[str, Callable[[Section, Layers], Layers]] = {
    "groups": _groups,
    "middle": _middle,
    "passes": _passes,
    "cycles": _cycles,
    "shared_blocks": _shared_blocks,
}


def run_order(text: Section, loop: str | None, layers: Layers) -> tuple[LayerSpec, ...]:
    """The layers in the order they run: as stored, or as the family's loop repeats them."""
    if loop is None and text.has("num_hidden_groups"):
        loop = "groups"
    return tuple(layers if loop is None else LOOPS[loop](text, layers))

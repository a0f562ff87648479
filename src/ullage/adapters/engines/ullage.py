"""What the embedded engine makes of an adapter: `judge` asks the engine's own loading code.

Holds the translation of its answer only; the rules are `ullage.engine.lora`, imported when asked.
"""

from __future__ import annotations

from ullage import __version__
from ullage.adapters.base import BaseTree
from ullage.adapters.effect import module_verdict
from ullage.adapters.verdict import EngineAnswer, ModuleVerdict, ServeOptions, State
from ullage.anatomy.adapters.adapter import Adapter, AdapterModule
from ullage.errors import BadInput, BadUsage

SOURCE = f"ullage {__version__}: engine/lora.py"
DEFAULT_MAX_LORA_RANK = 16
DEFAULT_MAX_LORAS = 8
_FLOAT32_BYTES = 4


def judge(adapter: Adapter, tree: BaseTree, options: ServeOptions) -> EngineAnswer:
    """What becomes of every module when `ullage serve --enable-lora` loads the adapter.

    Raises BadUsage where the engine's dependencies are not installed.
    """
    try:
        from ullage.engine.lora import placed, require_coverage
        from ullage.engine.model.support import require_supported
    except ImportError as error:
        if (error.name or "ullage").startswith("ullage"):
            raise  # our own mistake, not a missing extra
        raise BadUsage(
            f"{error.name} is not installed", expected="pip install 'ullage[engine]'"
        ) from error
    rank = options.max_lora_rank or DEFAULT_MAX_LORA_RANK
    message: str | None = None
    modules: tuple[ModuleVerdict, ...] = ()
    try:
        require_supported(tree.spec, max_model_len=1)
        found = placed(adapter, tree.spec, rank)
        require_coverage(adapter, found, tree.spec, allow_partial=False)
        modules = tuple(_verdict(module, State.APPLIED) for module, _ in found)
    except BadInput as refusal:
        message = str(refusal)
        modules = tuple(_verdict(module, State.REFUSED, message) for module in adapter.modules)
    return EngineAnswer(
        modules=modules,
        basis="verified",
        source=SOURCE,
        version=__version__,
        message=message,
        slot_bytes=None if message is not None else _float32_bytes(adapter),
        limits=(
            ("--max-lora-rank", rank),
            ("--max-loras", options.max_loras or DEFAULT_MAX_LORAS),
        ),
    )


def _verdict(module: AdapterModule, state: State, detail: str = "") -> ModuleVerdict:
    """The engine names modules as the base does, and multiplies with the scale that was meant."""
    if state is State.APPLIED:
        return module_verdict(module, module.module, state, module.scale)
    return module_verdict(module, None, state, detail=detail)


def _float32_bytes(adapter: Adapter) -> int:
    """There are no slots of a fixed size: an adapter takes what its own matrices take."""
    total = 0
    for module in adapter.modules:
        assert module.rank is not None
        assert module.in_features is not None
        assert module.out_features is not None
        total += module.rank * (module.in_features + module.out_features)
    return total * _FLOAT32_BYTES

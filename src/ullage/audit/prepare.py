"""From a loaded model and a deployment to a Subject with its memory ledger, where one can be made.

Holds the order of those steps only. The planner is imported when hardware was named, so that an
audit without any starts faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ullage.anatomy import Model
from ullage.audit.checkpoint import PICKLE_ENDINGS
from ullage.audit.subject import Subject, subject_of
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import Gpus
from ullage.errors import BadInput
from ullage.launch.open_values import OpenValue, known_or_none

if TYPE_CHECKING:
    from ullage.anatomy.files.pickles import PickleImports
    from ullage.deep.readings import DeepScan
    from ullage.launch.launch import Launch


def prepare(
    model: Model,
    deployment: Deployment,
    gpus: Gpus | None = None,
    *,
    choose_sizes: bool = False,
    deep: DeepScan | None = None,
    launch: Launch | None = None,
) -> tuple[Subject, str]:
    """The Subject, and how its parallel sizes were chosen ("" when they were given).

    With `choose_sizes`, N named devices and no sizes become tensor-parallel ranks as `ullage size`
    chooses them. A ledger that cannot be made leaves the memory rules not evaluable, with the
    reason. `deep` is what reading every tensor found. `launch` is the command that `deployment`
    was read from: where it hides a value, or sets what no ledger counts, there is no ledger, and
    what it replaces in the configuration is replaced before anything is judged.
    """
    replaced = None
    if launch is not None:
        from ullage.launch.overridden import started_model  # only commands replace anything

        model, replaced = started_model(model, launch)
    pickles = _pickles(model)
    if gpus is None and known_or_none(deployment, "kv_cache_memory_bytes") is None:
        return subject_of(
            model, deployment, deep=deep, pickles=pickles, launch=launch, replaced=replaced
        ), ""
    from ullage.planning.ledger import build_ledger
    from ullage.planning.parallel_sizes import spread

    choice = ""
    ledger, no_ledger = None, "" if launch is None else _uncounted(model, launch)
    if replaced is not None and replaced.open:
        no_ledger = replaced.missing()[0]
    try:
        if choose_sizes and gpus is not None and gpus.count > 1:
            deployment, choice = spread(model.anatomy.high, deployment, gpus.count)
        if not no_ledger:
            ledger = build_ledger(model.anatomy, deployment, gpus)
    except OpenValue as hidden:
        no_ledger = str(hidden)
    except BadInput as error:
        no_ledger = f"a memory ledger ({error})"
    subject = subject_of(
        model,
        deployment,
        gpus=gpus,
        ledger=ledger,
        no_ledger=no_ledger,
        deep=deep,
        pickles=pickles,
        launch=launch,
        replaced=replaced,
    )
    return subject, choice


def _uncounted(model: Model, launch: Launch) -> str:
    """Why no ledger stands for this command: flags that change the memory uncounted; "" if none."""
    from ullage.launch.settings import unpriced

    section = (model.files.config or {}).get("quantization_config")
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    flags = unpriced(launch, method if isinstance(method, str) else None)
    return f"a memory ledger that counts {', '.join(flags)}" if flags else ""


def _pickles(model: Model) -> tuple[PickleImports, ...] | None:
    """What the directory's pickled files would import; None where there is no directory."""
    files = model.files
    if files.kind != "directory":
        return None
    names = [name for name in files.other_files if name.endswith(PICKLE_ENDINGS)]
    if not names:
        return ()
    from ullage.anatomy.files.pickles import all_imports  # few models have any

    return all_imports([files.path / name for name in names])

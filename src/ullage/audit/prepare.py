"""From a loaded model and a deployment to a Subject with its memory ledger, where one can be made.

Holds the order of those steps only. The planner is imported when hardware was named, so that an
audit without any starts faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.anatomy import Model
from ullage.audit.checkpoint import PICKLE_ENDINGS
from ullage.audit.subject import Subject, subject_of
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import Gpus
from ullage.errors import BadInput

if TYPE_CHECKING:
    from ullage.anatomy.pickles import PickleImports
    from ullage.deep.readings import DeepScan


def prepare(
    model: Model,
    deployment: Deployment,
    gpus: Gpus | None = None,
    *,
    choose_sizes: bool = False,
    deep: DeepScan | None = None,
) -> tuple[Subject, str]:
    """The Subject, and how its parallel sizes were chosen ("" when they were given).

    With `choose_sizes`, N named devices and no sizes become tensor-parallel ranks as `ullage size`
    chooses them. A ledger that cannot be made leaves the memory rules not evaluable, with the
    reason. `deep` is what reading every tensor found.
    """
    pickles = _pickles(model)
    if gpus is None and deployment.kv_cache_memory_bytes is None:
        return subject_of(model, deployment, deep=deep, pickles=pickles), ""
    from ullage.planning.ledger import build_ledger
    from ullage.planning.parallel_sizes import spread

    choice = ""
    if choose_sizes and gpus is not None and gpus.count > 1:
        deployment, choice = spread(model.anatomy.high, deployment, gpus.count)
    try:
        ledger, no_ledger = build_ledger(model.anatomy, deployment, gpus), ""
    except BadInput as error:
        ledger, no_ledger = None, f"a memory ledger ({error})"
    subject = subject_of(
        model,
        deployment,
        gpus=gpus,
        ledger=ledger,
        no_ledger=no_ledger,
        deep=deep,
        pickles=pickles,
    )
    return subject, choice


def _pickles(model: Model) -> tuple[PickleImports, ...] | None:
    """What the directory's pickled files would import; None where there is no directory."""
    files = model.files
    if files.kind != "directory":
        return None
    names = [name for name in files.other_files if name.endswith(PICKLE_ENDINGS)]
    if not names:
        return ()
    from ullage.anatomy.pickles import all_imports  # few models have any

    return all_imports([files.path / name for name in names])

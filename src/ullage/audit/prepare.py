"""From a loaded model and a deployment to a Subject with its memory ledger, where one can be made.

Holds the order of those steps only. The planner is imported when hardware was named, so that an
audit without any starts faster.
"""

from __future__ import annotations

from ullage.anatomy import Model
from ullage.audit.subject import Subject, subject_of
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import Gpus
from ullage.errors import BadInput


def prepare(
    model: Model, deployment: Deployment, gpus: Gpus | None = None, *, choose_sizes: bool = False
) -> tuple[Subject, str]:
    """The Subject, and how its parallel sizes were chosen ("" when they were given).

    With `choose_sizes`, N named devices and no sizes become tensor-parallel ranks as `ullage size`
    chooses them. A ledger that cannot be made leaves the memory rules not evaluable, with the
    reason.
    """
    if gpus is None and deployment.kv_cache_memory_bytes is None:
        return subject_of(model, deployment), ""
    from ullage.planning.ledger import build_ledger
    from ullage.planning.parallel_sizes import spread

    choice = ""
    if choose_sizes and gpus is not None and gpus.count > 1:
        deployment, choice = spread(model.anatomy.high, deployment, gpus.count)
    try:
        ledger, no_ledger = build_ledger(model.anatomy, deployment, gpus), ""
    except BadInput as error:
        ledger, no_ledger = None, f"a memory ledger ({error})"
    return subject_of(model, deployment, gpus=gpus, ledger=ledger, no_ledger=no_ledger), choice

"""Rules about a replica's pod: W025, and what of a pod explains that no engine answers in it.

Holds how long each state of a pod is part of a normal life. What Kubernetes says is
`telemetry.pods`'; that the engine itself started anew is W012's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import Lacking, answering, seconds

LOADING_S = 1800.0
"""Three times the 10 min that vLLM 0.32 waits for its own engine (envs.py) and that a Deployment
has to progress (progressDeadlineSeconds): images and weights are fetched before that."""
UNSCHEDULED_S = 900.0
"""What Cluster Autoscaler gives a new node to come (--max-node-provision-time)."""
HOPELESS_S = 300.0
"""kubelet's longest pause between two tries of a container or an image."""
LOST_S = 300.0
"""What rules mean by recently: one failed probe, or a long prompt in its way, is over by then."""
OVERDUE_S = 300.0
"""What a node that does not answer is given before its pods are evicted (tolerationSeconds)."""
AGO_S = 3600.0
"""How long a container's end is news."""
LOOP = 3

HOPELESS = frozenset(
    {
        "ImagePullBackOff",
        "ErrImagePull",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
"""What a container waits for that waiting alone seldom brings (kubelet's container and image
errors)."""
SHOWN = (
    "phase",
    "ready",
    "unready_since",
    "reason",
    "restarts",
    "last_termination",
    "terminating_since",
    "gone_by",
    "as_of",
)
_WAITS = re.compile(r"container (?P<container>[^:]+): (?P<reason>\w+)")
_ENDED = re.compile(
    r"(?P<container>[^:]+): (?P<reason>[^,]+), exit code (?P<code>-?\d+) at (?P<at>\S+)"
)


@dataclass(frozen=True, slots=True)
class State:
    """A pod's facts, read, at `time_s`; `as_of_s` is when Kubernetes told them last.

    `answers`: its engine did in the last round. `lost`: it was seen ready before it was not.
    `gained` are the restarts seen within AGO_S.
    """

    facts: Mapping[str, str]
    time_s: float
    as_of_s: float
    answers: bool
    lost: bool
    gained: int

    def get(self, name: str) -> str:
        return self.facts.get(name, "")

    @property
    def ready(self) -> bool:
        return self.get("ready") == "true"

    @property
    def waits_for(self) -> str:
        """What a container of it waits for, by kubelet's word."""
        found = _WAITS.match(self.get("reason"))
        return found["reason"] if found else ""

    def age_s(self, name: str) -> float | None:
        """For how long Kubernetes had told the fact, which is a time; None where it is none."""
        since_s = _unix(self.get(name))
        return None if since_s is None else max(0.0, self.as_of_s - since_s)


@dataclass(frozen=True, slots=True)
class Trouble:
    cause: str
    remedy: str
    severity: Severity = Severity.error


def state_of(subject: Subject) -> State | None:
    """The replica's pod; None where nothing is known of one."""
    view = subject.view
    if view.pod is None:
        return None
    as_of_s = _unix(view.pod.get("as_of", ""))
    ready, gained = "", 0
    for change in view.changes:
        if change.what == "pod uid":
            ready, gained = "", 0  # another pod under the name
        elif change.what == "pod ready":
            ready = change.after
        elif change.what == "pod restarts" and change.time_s >= subject.time_s - AGO_S:
            gained += max(0, _int(change.after) - _int(change.before))
    return State(
        view.pod,
        subject.time_s,
        subject.time_s if as_of_s is None else min(as_of_s, subject.time_s),
        answers=view.now is not None and not view.error,
        lost=ready == "false",
        gained=gained,
    )


def begins(subject: Subject) -> bool:
    """Whether the engine has yet to answer for the first time, as in every rollout."""
    state = state_of(subject)
    if state is None or state.ready or state.get("phase") not in ("Pending", "Running"):
        return False
    created_s, now = _unix(state.get("created")), subject.view.now
    answered = now is not None and (created_s is None or now.time_s >= created_s)
    age_s = state.age_s("unready_since")
    return not (answered or _int(state.get("restarts")) or _told(state)) and (
        age_s is not None and age_s < LOADING_S
    )


def leaves(subject: Subject) -> bool:
    """Whether its pod was asked to end and still has time to."""
    state = state_of(subject)
    return state is not None and bool(state.get("terminating_since")) and not _told(state)


# --- what may be wrong ----------------------------------------------------------------------------


def _overdue(state: State) -> Trouble | None:
    overdue_s = state.age_s("gone_by")
    if overdue_s is None or overdue_s < OVERDUE_S:
        return None
    return Trouble(
        f"The pod should have been gone {seconds(overdue_s)} ago and is still there.",
        "See whether its node answers (kubectl get node), then for processes that no signal ends "
        "(state D, on a GPU that hangs) and for finalizers.",
        Severity.warning,
    )


def _failed(state: State) -> Trouble | None:
    if state.get("phase") != "Failed":
        return None
    return Trouble(
        f"The pod has failed and will not run again: {state.get('reason') or 'no reason is told'}.",
        "kubectl describe pod tells what its node was short of. Its controller makes another one; "
        "without a controller start it anew.",
    )


def _killed(state: State) -> Trouble | None:
    ended = _ENDED.fullmatch(state.get("last_termination"))
    ended_s = _unix(ended["at"]) if ended else None
    if ended is None or ended_s is None or ended["reason"] != "OOMKilled":
        return None
    ago_s = max(0.0, state.time_s - ended_s)
    if ago_s > AGO_S:
        return None
    return Trouble(
        f"Container {ended['container']} was killed {seconds(ago_s)} ago for want of host memory "
        "(OOMKilled).",
        "Raise its memory limit (or, where the node ran out, its request), or ask for less of the "
        "host: weights on their way to the device, CPU offload and swap space, /dev/shm and tmpfs "
        "all count.",
    )


def _loops(state: State) -> Trouble | None:
    restarts = _int(state.get("restarts"))
    backs_off = state.waits_for == "CrashLoopBackOff" and restarts >= LOOP
    if not backs_off and state.gained < LOOP:
        return None
    last = state.get("last_termination")
    ended = f" The last one ended: {last}." if last else ""
    seen = f"{state.gained} restarts within {seconds(AGO_S)}" if state.gained else "and waits"
    return Trouble(
        f"Its containers start again and again ({seen}, {restarts} in all).{ended}",
        "Read the log of the run before (kubectl logs --previous); exit code 137 without OOMKilled "
        "is a probe that gave up too early (A176). Until then keep it out of the router.",
    )


def _hopeless(state: State) -> Trouble | None:
    age_s = state.age_s("unready_since")
    if state.waits_for not in HOPELESS or age_s is None or age_s < HOPELESS_S:
        return None
    return Trouble(
        f"A container cannot be started, and the pod has not been ready for {seconds(age_s)}: "
        f"{state.get('reason')}.",
        "Look at the image's name, the registry and its credentials (imagePullSecrets), and at the "
        "secrets and config maps that the container names.",
    )


def _unscheduled(state: State) -> Trouble | None:
    age_s = state.age_s("unready_since")
    if not state.get("reason").startswith("Unschedulable"):
        return None
    if age_s is None or age_s < UNSCHEDULED_S:
        return None
    return Trouble(
        f"No node has room for the pod for {seconds(age_s)}: {state.get('reason')}.",
        "Free or add a node with the devices that it asks for; look at its node selector, "
        "tolerations and quota, and whether the autoscaler may grow that group.",
    )


def _unready(state: State) -> Trouble | None:
    age_s = state.age_s("unready_since")
    if state.ready or age_s is None or any(explains(state) for explains in REASONS):
        return None
    if state.get("reason").startswith("SchedulingGated"):
        return None  # whoever gates it means it to wait
    if age_s < (LOST_S if state.answers and state.lost else LOADING_S):
        return None
    reason = state.get("reason")
    why = f": {reason}" if reason else ""
    if not state.answers:
        return Trouble(
            f"The pod has not been ready for {seconds(age_s)} and no engine answers in it{why}.",
            "Read its log: which file is it fetching, and does that go on? Weights on a local disk "
            "or a shared cache start faster.",
        )
    return Trouble(
        f"The engine answers and its pod has not been ready for {seconds(age_s)}, so no service "
        f"sends it requests{why}.",
        "Ask its readiness probe's path by hand: with an engine that is only busy, give the probe "
        "more time (timeoutSeconds, failureThreshold) or a lighter path.",
        Severity.warning,
    )


Check = Callable[[State], Trouble | None]
REASONS: tuple[Check, ...] = (_failed, _loops, _hopeless, _unscheduled)
"""Why a pod is not ready; none of them, and it is said that it is not."""
TROUBLES: tuple[Check, ...] = (_killed, *REASONS, _unready)
AT_ITS_END: tuple[Check, ...] = (_overdue,)


def _told(state: State) -> list[Trouble]:
    """What is wrong; of one that was asked to end, only that it does not."""
    checks = AT_ITS_END if state.get("terminating_since") else TROUBLES
    return [trouble for check in checks if (trouble := check(state)) is not None]


@answering
def _pod(subject: Subject) -> Answer:
    state = state_of(subject)
    if state is None:
        raise Lacking("what Kubernetes says of its pod (watch it with --k8s)")
    facts = tuple(
        Evidence(f"pod {name}", state.facts[name], "", "Kubernetes")
        for name in SHOWN
        if name in state.facts
    )
    told = _told(state)
    if told:
        return Fired(
            " ".join(trouble.cause for trouble in told),
            " ".join(trouble.remedy for trouble in told),
            facts,
            max(trouble.severity for trouble in told),
        )
    missing = [name for name in ("phase", "ready") if name not in state.facts]
    if not state.ready and not state.get("terminating_since") and not missing:
        missing = [] if state.age_s("unready_since") is not None else ["unready_since"]
    if missing:
        raise Lacking(*(f"the pod's {name} (Kubernetes does not say)" for name in missing))
    return Clear(facts)


# --- texts ----------------------------------------------------------------------------------------


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def _int(text: str) -> int:
    return int(text) if text.isdecimal() else 0


RULES = (
    Rule(
        id="W025",
        title="The replica's pod",
        severity=Severity.error,
        category="liveness",
        why="A pod that is killed for memory, restarts in a loop, finds no node or no image, or "
        "answers without being ready serves little or nothing; the engine's own metrics "
        "show that late or not at all. A pod that loads its weights is none of these: it is given "
        "30 minutes to be ready, 15 to find a node.",
        fix="Read why in the pod's state, then mend that.",
        source="Kubernetes 1.32, core/v1 PodStatus; kubelet's back-off of at most 5 min; Cluster "
        "Autoscaler --max-node-provision-time 15 min; vllm 0.32: envs.py, "
        "VLLM_ENGINE_READY_TIMEOUT_S 600",
        example="last_termination: vllm: OOMKilled, exit code 137, four minutes ago",
        check=_pod,
    ),
)

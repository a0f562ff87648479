"""The rule about flags that replace what the audited files say.

Holds the verdict; what becomes of each key is `launch/overridden.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ullage.audit.launch_flags import NO_LAUNCH, flag_fact
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Severity

if TYPE_CHECKING:
    from ullage.launch.overridden import Replaced

ELSEWHERE = {
    "vllm": ("--hf-config-path", "--tokenizer", "--model-class-overrides"),
    "sglang": ("--tokenizer-path",),
}
"""Flags that name other files than those that were audited."""


def _overrides(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if launch.absent_unknown:
        return NotEvaluable((f"the flags in {launch.absent_unknown[0]}",))
    from ullage.launch.overrides import OVERRIDE_FLAGS

    flag = OVERRIDE_FLAGS[launch.engine]
    names = ELSEWHERE[launch.engine]
    given = [f for f in launch.flags if f.name.rstrip(".") in names]
    given = [
        f for f in given if not f.name.startswith("--tokenizer") or f.values != (launch.model,)
    ]
    said = [f for f in launch.flags if f.name.rstrip(".") == flag]
    facts = tuple(flag_fact(launch, f, f.name.rstrip(".")) for f in (*given, *said))
    causes: list[str] = []
    remedies: list[str] = []
    if given:
        shown = ", ".join(dict.fromkeys(f.name.rstrip(".") for f in given))
        causes.append(
            f"The server reads something else than the files that were audited ({shown}): findings "
            "about what it replaces speak of the files, not of the server."
        )
        remedies.append("Audit the files that the flag names.")
    if subject.replaced is not None:
        causes += _told(launch.engine, flag, subject.replaced, remedies)
    if causes:
        fatal = subject.replaced is not None and subject.replaced.fatal
        return Fired(" ".join(causes), " ".join(remedies), facts, Severity.error if fatal else None)
    absent = tuple(flag_fact(launch, None, name) for name in (flag, *names))
    return Clear(facts or absent)


def _told(engine: str, flag: str, replaced: Replaced, remedies: list[str]) -> Iterator[str]:
    """What is wrong with the keys that the command replaces, each in a sentence."""
    if replaced.idle:
        keys = "; ".join(f"{key}: {why}" for key, why in replaced.idle)
        remedies.append("Replace the key that the engine reads, or drop what does nothing.")
        yield f"{flag} changes nothing with {keys}."
    if replaced.fatal:
        remedies.append("Write rope_type where the replacement says type.")
        yield f"{flag}: {'; '.join(replaced.fatal)}: the server stops with an error."
    if replaced.lost:
        remedies.append("Say in the replacement all that the file said: it replaces the whole.")
        yield f"{flag}: {'; '.join(replaced.lost)}."
    if replaced.unread:
        remedies.append("Check the spelling of what is not known.")
        yield f"{flag} sets {', '.join(replaced.unread)}, which nothing here reads."
    if replaced.open:
        keys = "; ".join(f"{key}: {why}" for key, why in replaced.open)
        remedies.append("Write the change into the model's own config.json and audit that.")
        yield (
            f"What {engine} makes of {flag} is not known ({keys}): rules that rest on the "
            "configuration are not evaluated."
        )


RULES = (
    Rule(
        id="A169",
        title="Settings that replace the audited files",
        severity=Severity.warning,
        category="deployment",
        why="vLLM sets overridden keys on the finished configuration object: rope_theta beside "
        "rope_parameters does nothing, an object replaces all that the file said (a "
        "rope_parameters without rope_theta falls back to 10,000), and a key outside text_config "
        "does not reach the language model. The server starts, and answers worse.",
        fix="Replace whole objects, inside text_config where the model has one, or edit the file.",
        source="vllm 0.32: config/model.py, _apply_dict_overrides; transformers_utils/config.py, "
        "get_config; sglang 0.5.23: srt/utils/hf_transformers/config.py",
        example="--hf-overrides '{\"rope_theta\": 5000000}'",
        check=_overrides,
    ),
)

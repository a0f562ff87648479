"""The outputs of `ullage audit` other than its table: JSON, SARIF, JUnit, GitHub annotations.

Holds which document is built of what; the forms are `findings/`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ullage import __version__
from ullage.audit.rules import RULES
from ullage.audit.subject import Subject
from ullage.cli.deployment_file import Chosen
from ullage.findings.baseline import Accepted
from ullage.findings.finding import Finding
from ullage.findings.json import counts_document, finding_document
from ullage.launch.open_values import known_or_none

SCHEMA = "ullage.audit/1"


def document(
    name: str,
    subject: Subject,
    findings: Sequence[Finding],
    choice: str = "",
    chosen: Chosen | None = None,
    stale: Sequence[Accepted] = (),
) -> dict[str, object]:
    """The JSON document of one audit, schema `ullage.audit/1`.

    `choice` says how parallel sizes were chosen that the user did not give. A value of the
    deployment that its file hides is null. `stale` are baseline entries that no longer fire.
    """
    anatomy = subject.model.anatomy
    deployment = subject.deployment
    parallel = deployment.parallel
    return {
        "schema": SCHEMA,
        "model": name,
        "deployment": {
            "engine": deployment.engine,
            "engine_version": deployment.engine_version,
            "platform": deployment.platform,
            "gpu": None if subject.gpus is None else subject.gpus.hardware.name,
            "gpus": None if subject.gpus is None else subject.gpus.count,
            "tensor_parallel_size": known_or_none(parallel, "tensor"),
            "pipeline_parallel_size": known_or_none(parallel, "pipeline"),
            "data_parallel_size": known_or_none(parallel, "data"),
            "enable_expert_parallel": known_or_none(parallel, "expert"),
        },
        "decisions": [choice] if choice else [],
        "findings": [finding_document(finding) for finding in findings],
        "counts": counts_document(findings),
        "unknowns": [
            {"field": unknown.field, "found": unknown.found, "widens": list(unknown.widens)}
            for unknown in anatomy.spec.unknowns
        ],
        "unread": list(anatomy.unread),
        **_deep_part(subject),
        **({} if chosen is None else {"launch": chosen.document()}),
        **({"stale_baseline": [_stale(entry) for entry in stale]} if stale else {}),
    }


def _stale(entry: Accepted) -> dict[str, str]:
    return {"rule": entry.rule, "fingerprint": entry.fingerprint, "title": entry.title}


def ci_text(
    form: str,
    name: str,
    subject: Subject,
    findings: Sequence[Finding],
    chosen: Chosen | None,
    *,
    compared: bool,
) -> str:
    """The document in `form` (sarif, junit or github), ending in a newline."""
    from ullage.audit.places import place_finder  # these outputs alone point at lines
    from ullage.findings.place import RuleText

    place_of = place_finder(
        subject.model.files,
        None if chosen is None else chosen.flag_places(),
        None if chosen is None else chosen.start(),
    )
    rules = {
        rule.id: RuleText(
            rule.id, rule.title, rule.severity, rule.category, rule.why, rule.fix, rule.source
        )
        for rule in RULES
    }
    if form == "sarif":
        from ullage.findings.sarif import sarif

        log = sarif(findings, rules, place_of, version=__version__, compared=compared)
        return json.dumps(log, allow_nan=False) + "\n"
    if form == "junit":
        from ullage.findings.junit import junit

        return junit(name, findings, rules, place_of)
    from ullage.findings.github import workflow_commands

    return workflow_commands(findings, place_of)


def _deep_part(subject: Subject) -> dict[str, object]:
    """What `--deep` read, under its key; nothing without the flag."""
    if subject.deep is None:
        return {}
    from ullage.deep.readings import deep_document  # its data classes cost the start

    return {"deep": deep_document(subject.deep)}

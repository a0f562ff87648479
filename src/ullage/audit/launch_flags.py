"""Rules about the command that starts the server: its flags, their values, what they contradict.

Holds the verdicts; reading a command is `launch/`'s. Without a deployment file none is evaluable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ullage.audit.launch_replaced import REPLACED, SGLANG_REPLACED
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.audit.vllm import QUANTIZATION_METHODS
from ullage.findings.finding import Evidence, Severity
from ullage.launch.values import parse_integer

if TYPE_CHECKING:  # the tables of flags are imported where there is a command to judge
    from ullage.launch.launch import Given, Launch

NO_LAUNCH = NotEvaluable(("--deployment FILE",))

SECRETS = ("--api-key", "--admin-api-key", "--hf-token")
"""Flags whose values are shown nowhere."""


def source_of(launch: Launch, line: int) -> str:
    """Where the file says something: evidence names it, and annotations find the line."""
    return f"deployment: {launch.file}:{line}"


def flag_fact(launch: Launch, given: Given | None, name: str, value: str | None = None) -> Evidence:
    """A flag with its values, or that it is absent. Values of unknown flags are never shown."""
    if given is None:
        return Evidence(name, value, "", f"deployment: {launch.file} (not given)")
    return Evidence(name, value or " ".join(given.values) or "given", "", f"flag: {given.spelling}")


def missing_table(subject: Subject, launch: Launch) -> tuple[str, ...]:
    """Empty when the flags of the engine's version are recorded, else what is missing."""
    from ullage.launch.flags import VERSIONS

    known = VERSIONS[launch.engine]
    version = launch.version or subject.deployment.engine_version
    if version in (known, "unknown") or version.startswith((f"{known}.", f"{known}-")):
        return ()
    return (f"the flags of {launch.engine} {version} (known: {known})",)


def _known(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if missing := missing_table(subject, launch):
        return NotEvaluable(missing)
    from ullage.launch.flags import VERSIONS, known_flags

    wrong = [flag for flag in launch.flags if flag.trouble in ("unknown", "ambiguous")]
    if not wrong:
        count = Evidence("flags", len(launch.flags), "", source_of(launch, launch.line))
        table = Evidence("known flags", len(set(known_flags(launch.engine).values())), "",
                         f"{launch.engine} {VERSIONS[launch.engine]}")  # fmt: skip
        return Clear((count, table))
    facts = tuple(Evidence(f.spelling, f.trouble, "", f"flag: {f.spelling}") for f in wrong)
    names = ", ".join(dict.fromkeys(flag.spelling for flag in wrong))
    return Fired(
        f"{launch.engine} {VERSIONS[launch.engine]} has no flag {names}: the server stops at "
        "start with a usage error."
        if all(flag.trouble == "unknown" for flag in wrong)
        else f"{launch.engine} {VERSIONS[launch.engine]} does not take {names}: no flag is so "
        "called, or several begin so; the server stops at start with a usage error.",
        "; ".join(dict.fromkeys(_instead(launch, flag) for flag in wrong)) + ".",
        facts,
    )


def _instead(launch: Launch, flag: Given) -> str:
    dashed = flag.spelling.replace("_", "-")
    instead = (REPLACED if launch.engine == "vllm" else SGLANG_REPLACED).get(dashed)
    if instead is not None:
        return f"{flag.spelling}: {instead}"
    from ullage.launch.flags import nearest

    near = nearest(launch.engine, flag.spelling)
    return f"{flag.spelling}: {f'did you mean {near}' if near else 'drop it'}"


def _wrong_values(launch: Launch) -> Iterator[tuple[str, str, str]]:
    """(flag, what was found, what was expected) of each value that the parser refuses."""
    from ullage.launch.flags import known_flags
    from ullage.launch.settings import SETTINGS, problem_of

    settings = {setting.flag: setting for setting in SETTINGS[launch.engine]}
    for flag in launch.flags:
        known = known_flags(launch.engine).get(flag.name)
        if flag.trouble == "takes no value":
            yield flag.spelling, repr(" ".join(flag.values)[:40]), "no value (--no-… turns it off)"
        elif flag.trouble == "no value":
            yield flag.spelling, "no value", "a value"
        elif flag.trouble or flag.open or known is None or known.name == "--kv-cache-dtype":
            continue  # A161 has unknown flags, A088 the KV dtypes
        elif known.choices and (
            bad := [v for v in flag.values if v not in known.choices and not _unset(known.kind, v)]
        ):
            yield flag.spelling, repr(bad[0][:40]), f"one of {', '.join(known.choices)}"
        elif bad := [v for v in flag.values if not _parses(known.kind, v)]:
            yield flag.spelling, repr(bad[0][:40]), f"a value of kind {known.kind.rstrip('?')}"
        elif flag.name in settings and (found := problem_of(settings[flag.name], flag)):
            yield flag.spelling, found, settings[flag.name].expected


def _parses(kind: str, text: str) -> bool:
    if _unset(kind, text):
        return True
    kind = kind.rstrip("?")
    try:
        if kind == "integer":
            int(text)
        elif kind == "number":
            float(text)
        elif kind == "json":
            json.loads(text)
        elif kind == "size" or (kind == "size-or-auto" and text.lower() not in ("auto", "-1")):
            parse_integer(text)
    except (ValueError, OverflowError, RecursionError):
        return False
    return True


def _unset(kind: str, text: str) -> bool:
    """Whether the parser takes the text for "not set"."""
    return kind.endswith("?") and text in ("", "None")


def _values(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if missing := missing_table(subject, launch):
        return NotEvaluable(missing)
    wrong = list(_wrong_values(launch))
    strays = [repr(word.text[:40]) for word in launch.strays if not word.open]
    if not wrong and not strays:
        return Clear((Evidence("values", len(launch.flags), "", source_of(launch, launch.line)),))
    said = [f"{flag} is given {found}, and takes {expected}" for flag, found, expected in wrong]
    if strays:
        said.append(f"{', '.join(strays)} belongs to no flag")
    facts = tuple(Evidence(flag, found, "", f"flag: {flag}") for flag, found, _ in wrong)
    facts += tuple(
        Evidence(f"word {word.text[:40]!r}", None, "", source_of(launch, word.line))
        for word in launch.strays
        if not word.open
    )
    return Fired(
        f"{'; '.join(said)}: {launch.engine} stops at start with a usage error."
        if wrong
        else f"{'; '.join(said)}: it changes nothing, or stops the server with a usage error.",
        "Correct the values; a switch is turned off by its --no- spelling, not by a value.",
        facts,
        None if wrong else Severity.warning,
    )


def _repeated(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    by_name: dict[str, list[Given]] = {}
    for flag in launch.flags:
        if flag.name and not flag.name.endswith("."):
            by_name.setdefault(flag.name, []).append(flag)
    twice = {n: fs for n, fs in by_name.items() if len({f.values for f in fs}) > 1}
    for name in ("--middleware", *SECRETS):  # one appends, the others are not for showing
        twice.pop(name, None)
    if not twice:
        return Clear((Evidence("flags", len(by_name), "", source_of(launch, launch.line)),))
    name, flags = next(iter(twice.items()))
    said = " and then ".join(" ".join(flag.values)[:60] for flag in flags)
    more = f" (and {len(twice) - 1} more flags)" if len(twice) > 1 else ""
    return Fired(
        f"{name} is given {said}{more}: the last one wins, without a word.",
        "Keep the one that is meant.",
        tuple(
            Evidence(name, " ".join(f.values)[:60], "", source_of(launch, f.line))
            for name, fs in twice.items()
            for f in fs
        ),
    )


METHOD_FAMILIES = {
    "awq": "awq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
}
OVERRIDING = frozenset(
    [
        *("auto_gptq", "gptq", "gptq_marlin", "auto_awq", "awq", "awq_marlin", "inc", "moe_wna16"),
        *("modelopt", "modelopt_fp4", "modelopt_mxfp8", "mxfp8", "modelopt_mixed", "mxfp4"),
        *("gpt_oss_mxfp4", "deepseek_v4_fp8", "humming"),
    ]
)
"""Methods that may take over another's checkpoints (vllm/config/model.py, _verify_quantization)."""

STORED_ONLY = frozenset(
    [*METHOD_FAMILIES, "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed", "quark"]
)
"""Methods that read a section of the configuration and cannot quantise as they load."""


def _quantization(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if missing := subject.missing_engine_rules():
        return NotEvaluable(missing)
    given = launch.given("--quantization")
    section = subject.config.get("quantization_config") or subject.text.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    stored = Evidence(
        "quant_method", method if isinstance(method, str) else None, "",
        subject.where("quantization_config"),
    )  # fmt: skip
    if given is None:
        if launch.absent_unknown:
            return NotEvaluable((f"--quantization (perhaps in {launch.absent_unknown[0]})",))
        return Clear((flag_fact(launch, None, "--quantization"), stored))
    if given.open or not given.values:
        return NotEvaluable((f"the value of --quantization ({given.open or 'none is given'})",))
    wanted = given.values[0]
    facts = (flag_fact(launch, given, "--quantization"), stored)
    if wanted == method:
        return Clear(facts)
    if wanted not in QUANTIZATION_METHODS:
        return Fired(
            f"vLLM 0.32 knows no quantisation method {wanted[:40]!r}.",
            "Drop --quantization: the checkpoint's own method is read from its configuration.",
            facts,
        )
    if isinstance(method, str):
        mine, theirs = METHOD_FAMILIES.get(wanted), METHOD_FAMILIES.get(method)
        if wanted in OVERRIDING and (mine is None or theirs is None or mine == theirs):
            return NotEvaluable((f"whether {wanted} takes over {method} checkpoints",))
        return Fired(
            f"The checkpoint is quantised with {method}, and --quantization asks for {wanted}: "
            "vLLM 0.32 refuses to start when the two differ.",
            "Drop --quantization: the checkpoint's own method is read from its configuration.",
            facts,
        )
    if subject.model.files.quant_side is not None or subject.model.files.config is None:
        return NotEvaluable(("quantization_config in config.json",))
    if wanted in STORED_ONLY:
        return Fired(
            f"--quantization {wanted} reads how the weights are quantised from the configuration, "
            "which says nothing: these weights are not quantised.",
            "Drop --quantization, or take a checkpoint that is quantised so.",
            facts,
        )
    return Clear(facts)


def _remote_code(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    files = subject.model.files
    if files.config is None:
        return NotEvaluable(("config.json",))
    given = launch.given("--trust-remote-code")
    if given is None and launch.absent_unknown:
        return NotEvaluable((f"--trust-remote-code (perhaps in {launch.absent_unknown[0]})",))
    brings = [
        place
        for place, config in (
            ("config.json", files.config),
            ("tokenizer_config.json", files.tokenizer_config or {}),
        )
        if config.get("auto_map")
    ]
    facts = (
        flag_fact(launch, given, "--trust-remote-code"),
        Evidence("auto_map in", ", ".join(brings) or "no file", "", "config: auto_map"),
    )
    if given is None or given.values == ("false",) or brings:
        return Clear(facts)
    if files.kind != "directory":
        return NotEvaluable(("tokenizer_config.json (give the model's directory)",))
    return Fired(
        "--trust-remote-code lets Python files of the checkpoint run with the server's rights, "
        "and this checkpoint brings none: the flag only helps whoever changes it.",
        "Drop --trust-remote-code.",
        facts,
    )


def _name(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    given = launch.given("--served-model-name")
    if given is None and launch.absent_unknown:
        return NotEvaluable((f"--served-model-name (perhaps in {launch.absent_unknown[0]})",))
    facts = (
        flag_fact(launch, given, "--served-model-name"),
        Evidence("model", launch.model, "", source_of(launch, launch.line)),
    )
    if given is not None:
        return Clear(facts)
    if launch.model is None or launch.model_open:
        return NotEvaluable((f"the model's name ({launch.model_open or 'none is given'})",))
    if not launch.model.startswith(("/", "./", "../", "~")):
        return Clear(facts)
    return Fired(
        f"The model is a path, and no --served-model-name is given: every request must name "
        f"{launch.model[:80]!r} as its model.",
        "Pass --served-model-name with the name that clients use.",
        facts,
    )


RULES = (
    Rule(
        id="A161",
        title="Flags that the server knows",
        severity=Severity.error,
        category="deployment",
        why="The server's parser refuses a flag that it does not know; flags come and go between "
        "versions, so that a command which worked stops the next rollout.",
        fix="Correct the spelling, or drop what the version no longer has.",
        source="vllm 0.32's own parser, recorded by tools/record_vllm_flags.py; sglang 0.5.23",
        example="--swap-space 4, or --max-model-length 8192",
        check=_known,
    ),
    Rule(
        id="A162",
        title="Values of the flags",
        severity=Severity.error,
        category="deployment",
        why="A value of the wrong kind, or a word after a switch that takes none, is a usage error "
        "at start.",
        fix="Give what the flag takes; turn switches off by their --no- spelling.",
        source="vllm 0.32's own parser, recorded by tools/record_vllm_flags.py; sglang 0.5.23",
        example="--enable-prefix-caching=false, or --dtype fp16",
        check=_values,
    ),
    Rule(
        id="A163",
        title="Flags that are given more than once",
        severity=Severity.warning,
        category="deployment",
        why="The last value wins silently, which is seldom the one that was edited.",
        fix="Keep one.",
        source="argparse; vllm 0.32: utils/argparse_utils.py",
        example="--max-model-len 8192 … --max-model-len 32768",
        check=_repeated,
    ),
    Rule(
        id="A166",
        title="--quantization against the checkpoint",
        severity=Severity.error,
        category="deployment",
        why="vLLM compares the flag with the checkpoint's own method and stops when they differ.",
        fix="Leave the flag out: the method is read from the configuration.",
        source="vllm 0.32: config/model.py, _verify_quantization",
        example="--quantization awq on a GPTQ checkpoint",
        check=_quantization,
    ),
    Rule(
        id="A167",
        title="--trust-remote-code against what the checkpoint brings",
        severity=Severity.warning,
        category="deployment",
        why="The flag hands the server's rights to whatever Python the checkpoint holds, now or "
        "after its next update.",
        fix="Leave it off unless config.json has an auto_map that the engine needs.",
        source="vllm 0.32: transformers_utils/config.py; transformers auto_map",
        example="--trust-remote-code with Llama-3.1-8B",
        check=_remote_code,
    ),
    Rule(
        id="A168",
        title="Name under which the model is served",
        severity=Severity.info,
        category="deployment",
        why="Without --served-model-name the path is the name that requests and metrics carry.",
        fix="Pass --served-model-name.",
        source="vllm 0.32: --served-model-name",
        example="vllm serve /models/llama without --served-model-name",
        check=_name,
    ),
)

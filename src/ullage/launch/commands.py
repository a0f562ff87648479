"""Which words start a vLLM or SGLang server, and the Launch that they make.

Holds the ways in which servers are started (`vllm serve`, the api_server module, SGLang's, a
container's image, `docker run`, `sh -c`). Reading files is `documents.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ullage.launch.flags import read_flags
from ullage.launch.launch import EngineName, Host, Kind, Launch, Word
from ullage.launch.shell import commands
from ullage.launch.values import image_version, parse_bytes

MODULES: dict[str, EngineName] = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "sglang.launch_server": "sglang",
}
PROGRAMS: dict[tuple[str, str], EngineName] = {
    ("vllm", "serve"): "vllm",
    ("sglang", "serve"): "sglang",
}
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh"})
RUNNERS = frozenset({"docker", "podman", "nerdctl"})
MODEL_FLAGS = {"vllm": "--model", "sglang": "--model-path"}
MAX_SHELL_DEPTH = 4
# Flags of `docker run` that matter here or take a value that could look like an image.
_DOCKER_SWITCHES = frozenset(
    (
        *("-d", "-i", "-t", "-it", "-ti", "--rm", "--detach", "--init", "--interactive"),
        *("--privileged", "--tty", "--read-only"),
    )
)


@dataclass(frozen=True, slots=True)
class Start:
    """Words after the start of a server, what engine, and the environment that stands there."""

    engine: EngineName
    words: tuple[Word, ...]
    line: int
    environment: tuple[tuple[str, Word], ...] = ()
    image: str | None = None
    host: Host | None = None
    takes_model: bool = True
    background: bool = False


def starts_in_shell(text: str, line: int = 1, depth: int = 0) -> list[Start]:
    """Every server that shell text starts. Raises ValueError with a reason."""
    found: list[Start] = []
    for command in commands(text, line):
        found += [
            replace(
                start,
                # A container sees none of the shell's variables but those that it is given.
                environment=start.environment
                if start.image is not None
                else (*command.assignments, *start.environment),
                background=start.background or command.background,
            )
            for start in starts_in_words(command.words, depth)
        ]
    return found


def starts_in_words(words: Sequence[Word], depth: int = 0) -> list[Start]:
    """The servers that one command starts (more than one only through `sh -c`)."""
    for index, word in enumerate(words):
        name = _base(word)
        following = words[index + 1].text if index + 1 < len(words) else ""
        if name in SHELLS and depth < MAX_SHELL_DEPTH:
            script = _script(words[index + 1 :])
            if script is not None:
                return starts_in_shell(script.text, script.line, depth + 1)
        if name in RUNNERS and following == "run":
            return _docker_run(words[index + 2 :], depth)
        engine = PROGRAMS.get((name, following))
        if engine is not None:
            return [Start(engine, tuple(words[index + 2 :]), word.line)]
        if word.text == "-m" and following in MODULES:
            engine = MODULES[following]
            rest = tuple(words[index + 2 :])
            if following == "vllm.entrypoints.cli.main":
                if not rest or rest[0].text != "serve":
                    continue
                rest = rest[1:]
            takes_model = following == "vllm.entrypoints.cli.main"
            return [Start(engine, rest, word.line, takes_model=takes_model)]
    return []


def image_engine(image: str | None) -> EngineName | None:
    """The engine whose server is the image's entrypoint, None where it is not known."""
    if image is None:
        return None
    name = image.split("@")[0].rsplit("/", 1)[-1].split(":")[0]
    return "vllm" if name.startswith("vllm-openai") or name == "vllm" else None


def container_starts(
    image: str | None, command: Sequence[Word], args: Sequence[Word], line: int
) -> list[Start]:
    """The servers of a container; without a command the image's entrypoint decides."""
    found = starts_in_words([*command, *args])
    if found or command:
        return found
    engine = image_engine(image)
    return [] if engine is None else [Start(engine, tuple(args), line)]


def launch_of(
    start: Start,
    *,
    name: str,
    file: str,
    kind: Kind,
    image: str | None = None,
    environment: Mapping[str, str | None] = {},
    host: Host | None = None,
) -> Launch:
    """The Launch of one start; what the file says around it comes from the caller."""
    words = _without_backend(start) if start.engine == "sglang" else start.words
    start = replace(start, words=words)
    flags, strays = read_flags(start.engine, start.words)
    model, model_open = None, ""
    absent = tuple(dict.fromkeys(word.open for word in strays if word.splits))
    strays = [word for word in strays if not word.splits]
    if start.takes_model and strays and (start.engine == "vllm" or strays[0] is start.words[0]):
        # sglang serve takes a model as its first word only (0.5.23: cli/serve.py)
        model, model_open = strays[0].text, strays[0].open
        strays = strays[1:]
    elif start.takes_model and absent and start.words[:1]:
        first = start.words[0]
        if first.splits:  # `vllm serve $MODEL`: one word as a rule, but it may hold more
            model, model_open = first.text, first.open
    known = {**{key: None if w.open else w.text for key, w in start.environment}, **environment}
    launch = Launch(
        name=name,
        file=file,
        line=start.line,
        kind=kind,
        engine=start.engine,
        flags=tuple(flags),
        version=image_version(image or start.image),
        model=model,
        model_open=model_open,
        strays=tuple(strays),
        environment=tuple(known.items()),
        host=host or start.host or Host(),
        background=start.background,
    )
    named = launch.given(MODEL_FLAGS[start.engine])
    if named is not None and named.values:
        launch = replace(launch, model=named.values[0], model_open=named.open)
    config = launch.given("--config")
    if config is not None:
        absent = (*absent, f"--config {' '.join(config.values)}")
    headless = launch.given("--headless") is not None
    return replace(launch, absent_unknown=absent, headless=headless)


def _without_backend(start: Start) -> tuple[Word, ...]:
    """The words without `--model-type`, which `sglang serve` takes away before it reads flags."""
    words = list(start.words)
    for index, word in enumerate(words if start.takes_model else ()):
        if word.text == "--model-type" or word.text.startswith("--model-type="):
            return (*words[:index], *words[index + (1 if "=" in word.text else 2) :])
    return start.words


def _base(word: Word) -> str:
    text = word.text.removeprefix("ExecStart=")  # systemd units read as shell text
    return "" if word.open else text.rsplit("/", 1)[-1]


def _script(words: Sequence[Word]) -> Word | None:
    """The text after `-c` (also in a cluster such as `-lc`), None without one."""
    for index, word in enumerate(words):
        if not word.text.startswith("-"):
            return None
        if not word.text.startswith("--") and "c" in word.text:
            return words[index + 1] if index + 1 < len(words) else None
    return None


def _docker_run(words: Sequence[Word], depth: int) -> list[Start]:
    """`docker run OPTIONS IMAGE ARGS`: the image is the first word that no option takes."""
    host = Host(shm="default")
    environment: list[tuple[str, Word]] = []
    detached = any(word.text in ("-d", "--detach") for word in words)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.text.startswith("-"):
            break
        name, equals, value = word.text.partition("=")
        given = Word(value, word.line, word.open)
        if not equals and name not in _DOCKER_SWITCHES and position < len(words):
            given = words[position]
            position += 1
        if name in ("-e", "--env"):
            key, _, text = given.text.partition("=")
            environment.append(
                (
                    key,
                    Word(text, given.line, given.open or ("" if "=" in given.text else f"${key}")),
                )
            )
        host = _docker_option(host, name, given)
    else:
        return []
    inner = starts_in_words(words[position:], depth)
    engine = image_engine(word.text)
    if not inner and engine is not None:
        inner = [Start(engine, tuple(words[position:]), word.line)]
    return [
        replace(
            s,
            environment=(*environment, *s.environment),
            image=word.text,
            host=host,
            background=detached,
        )
        for s in inner
    ]


def _docker_option(host: Host, name: str, given: Word) -> Host:
    if name == "--ipc" and given.text == "host":
        return replace(host, shm="unlimited")
    if name == "--shm-size" and host.shm != "unlimited":
        size = None if given.open else parse_bytes(given.text)
        return replace(host, shm="unknown" if size is None else "limited", shm_bytes=size)
    if name == "--gpus":
        ids = given.text.strip("\"'").removeprefix("device=").split(",")
        if given.text.strip("\"'").startswith("device=") and not given.open:
            return replace(host, gpus=len(ids), gpus_said=True, gpu_ids=tuple(ids))
        number = int(given.text) if given.text.isdecimal() else None
        return replace(host, gpus=number, gpus_said=True)
    if name in ("-p", "--publish"):
        return replace(host, exposed=host.exposed or not given.text.startswith("127.0.0.1:"))
    if name in ("--network", "--net") and given.text == "host":
        return replace(host, exposed=True)
    return host

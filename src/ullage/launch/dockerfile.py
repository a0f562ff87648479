"""Dockerfiles: the ENTRYPOINT, CMD and ENV of the last stage → the servers that it starts.

Holds the few instructions that decide how a container starts; the rest is passed over.
"""

from __future__ import annotations

import json

from ullage.errors import BadInput
from ullage.launch.commands import container_starts, launch_of, starts_in_shell
from ullage.launch.launch import Launch, Word
from ullage.launch.shell import plain_words


def dockerfile_launches(text: str, file: str) -> list[Launch]:
    """The servers of the last stage. Raises BadInput."""
    image: str | None = None
    entrypoint: str | tuple[Word, ...] = ()
    command: str | tuple[Word, ...] = ()
    environment: dict[str, str | None] = {}
    entry_line = command_line = 1
    for line, name, rest in _instructions(text):
        try:
            if name == "FROM":
                words = [w for w in rest.split() if not w.startswith("--")]
                image = words[0] if words and "$" not in words[0] else None
                entrypoint, command, environment = (), (), {}
            elif name == "ENV":
                environment.update(_environment(rest, line))
            elif name == "ENTRYPOINT":
                entrypoint, entry_line, command = _form(rest, line), line, ()
            elif name == "CMD":
                command, command_line = _form(rest, line), line
        except ValueError as error:
            raise BadInput(str(error), file=file, field=f"line {line}") from error
    try:
        if isinstance(entrypoint, str):  # the shell form ignores CMD
            starts = starts_in_shell(entrypoint, entry_line)
        elif isinstance(command, str) and not entrypoint:
            starts = starts_in_shell(command, command_line)
        else:
            args = plain_words(command, command_line) if isinstance(command, str) else command
            starts = container_starts(image, entrypoint, args, command_line)
    except ValueError as error:
        raise BadInput(str(error), file=file, field=f"line {command_line}") from error
    return [
        launch_of(
            start, name="image", file=file, kind="dockerfile", image=image, environment=environment
        )
        for start in starts
    ]


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line, NAME, the rest) of each instruction, continuations joined with their line breaks."""
    found: list[tuple[int, str, str]] = []
    held: list[str] = []
    start = 1
    for number, raw in enumerate(text.splitlines(), 1):
        stripped = raw.strip()
        if not stripped or stripped.startswith("#"):
            if held:
                held.append("\\\n")  # a comment inside a continuation is passed over
            continue
        if not held:
            start = number
        if stripped.endswith("\\"):
            held.append(stripped + "\n")
            continue
        name, _, rest = "".join([*held, stripped]).partition(" ")
        found.append((start, name.upper(), rest.strip()))
        held = []
    return found


def _form(rest: str, line: int) -> str | tuple[Word, ...]:
    """The words of an exec form (a JSON list), or the text of a shell form."""
    if not rest.startswith("["):
        return rest
    try:
        words = json.loads(rest.replace("\\\n", "\n"))
    except (ValueError, RecursionError):
        return rest  # docker too takes a list that is no JSON for a shell form
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("a list that is not one of texts")
    breaks = rest.split('"')
    lines = [line + '"'.join(breaks[: 2 * i + 1]).count("\n") for i in range(len(words))]
    return tuple(Word(word, at) for word, at in zip(words, lines, strict=True))


def _environment(rest: str, line: int) -> dict[str, str | None]:
    words = plain_words(f"env-of {rest}", line)[1:]
    if words and "=" not in words[0].text:  # ENV NAME value
        name, _, value = rest.partition(" ")
        return {name: None if "$" in value else value.strip()}
    pairs = (word.text.partition("=") for word in words)
    return {name: None if "$" in value else value for name, _, value in pairs if name}

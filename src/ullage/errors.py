"""The exception tree: what can go wrong through the user's input or an unreachable server.

Holds the exceptions only. Showing them (one sentence, one exit code) is the CLI's business.

    UllageError
    ├── BadInput               exit 2: a file, a field or a flag of the user's
    │   ├── MalformedConfig        a configuration that cannot be read or contradicts itself
    │   ├── MalformedCheckpoint    safetensors, GGUF or index files that lie
    │   ├── UnsupportedModel       understood as far as saying that it cannot be priced or run
    │   └── BadUsage               flags that do not go together
    └── Unreachable            exit 3: the thing to be checked does not answer
"""


class UllageError(Exception):
    """Root of every error that ullage raises on purpose."""

    exit_code = 2


class BadInput(UllageError):
    """Something that the user gave is wrong; `str()` is one clear sentence.

    Args:
        file: the file (or flag) at fault, or None.
        field: the field in it, dotted, or None.
        found: what was there.
        expected: what should have been there.
    """

    def __init__(
        self,
        found: str,
        *,
        file: object | None = None,
        field: str | None = None,
        expected: str | None = None,
    ) -> None:
        self.file = None if file is None else str(file)
        self.field = field
        self.found = found
        self.expected = expected
        super().__init__(self.sentence())

    def sentence(self) -> str:
        """`file: field: found; expected expected`, without line breaks or control characters."""
        place = ": ".join(part for part in (self.file, self.field) if part)
        text = f"{place}: {self.found}" if place else self.found
        if self.expected:
            text = f"{text}; expected {self.expected}"
        return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


class MalformedConfig(BadInput):
    """A configuration file cannot be read, or its fields contradict each other."""


class MalformedCheckpoint(BadInput):
    """A safetensors, GGUF or index file is truncated, lies about lengths or escapes its folder."""


class UnsupportedModel(BadInput):
    """The model was understood far enough to know that no honest figure can be given."""


class BadUsage(BadInput):
    """Flags are missing, contradictory or out of range."""


class Unreachable(UllageError):
    """The server to be checked does not answer, or not in time."""

    exit_code = 3

"""Shell text → simple commands with their words and assignments, without running anything.

Holds a reader of the grammar that start scripts use (quotes, continuations, comments, lists,
redirections, assignments). Variables and substitutions are not expanded: the word says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.launch.launch import Word

_BLANK = " \t\r"
_ENDS = "\n;&|()"
_NAME_START = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_")
_NAME = _NAME_START | frozenset("0123456789")
_SPECIAL = frozenset("@*#?-$!0123456789")
MAX_WORDS = 100_000
MAX_VARIABLES = 1_000


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command: its words, and the assignments that stand before it or were exported.

    `background`: an `&` ends it, so that what follows runs beside it.
    """

    words: tuple[Word, ...]
    assignments: tuple[tuple[str, Word], ...]
    background: bool = False


def commands(text: str, first_line: int = 1) -> list[Command]:
    """Every simple command of the text, in order.

    Raises ValueError with a reason: a quote or a substitution that never ends, too many words.
    """
    reader = _Reader(text, first_line)
    found: list[Command] = []
    exported: dict[str, Word] = {}
    while not reader.at_end():
        words = reader.command()
        assignments: dict[str, Word] = {}
        words = words[_leading_assignments(words, 0, assignments) :]
        if words and words[0].text in ("export", "declare", "readonly", "env"):
            rest = words[_leading_assignments(words, 1, assignments) :]
            if words[0].text != "env":
                exported.update(assignments)
                if len(exported) > MAX_VARIABLES:
                    raise ValueError(f"more than {MAX_VARIABLES:,} exported variables")
                continue
            words = rest
        if words:
            settings = tuple({**exported, **assignments}.items())
            found.append(Command(tuple(words), settings, reader.background))
    return found


def plain_words(text: str, first_line: int = 1) -> tuple[Word, ...]:
    """The words of a text that is one command (as compose and Dockerfiles have them)."""
    return tuple(word for command in commands(text, first_line) for word in command.words)


def _leading_assignments(words: list[Word], start: int, found: dict[str, Word]) -> int:
    """Puts the assignments from `start` on into `found`; returns where the first other word is."""
    while start < len(words) and (pair := _assignment(words[start])):
        found[pair[0]] = pair[1]
        start += 1
    return start


def _assignment(word: Word) -> tuple[str, Word] | None:
    name, equals, value = word.text.partition("=")
    if name == "ExecStart":  # a systemd unit, whose value is the command
        return None
    if not equals or not name or name[0] not in _NAME_START or not _NAME.issuperset(name):
        return None
    return name, Word(value, word.line, word.open)


class _Reader:
    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.position = 0
        self.line = line
        self.words = 0
        self.background = False

    def at_end(self) -> bool:
        return self.position >= len(self.text)

    def peek(self, length: int = 1) -> str:
        return self.text[self.position : self.position + length]

    def take(self, length: int = 1) -> str:
        taken = self.peek(length)
        self.line += taken.count("\n")
        self.position += length
        return taken

    def command(self) -> list[Word]:
        """Words up to the next end of a command, which is taken too."""
        words: list[Word] = []
        self.background = False
        while not self.at_end():
            mark = self.peek()
            if self.peek(2) == "\\\n" or self.peek(3) == "\\\r\n":
                self.take(2 if self.peek(2) == "\\\n" else 3)
            elif mark in _BLANK:
                self.take()
            elif mark == "#":
                while not self.at_end() and self.peek() != "\n":
                    self.take()
            elif self.peek(2) == "&>" or mark in "<>":
                self.redirection()
            elif mark in _ENDS:
                self.background = mark == "&" and self.peek(2) != "&&"
                self.take(2 if self.peek(2) == "&&" else 1)
                return words
            else:
                word = self.word()
                if self.peek() in ("<", ">") and word.text.isdecimal() and not word.open:
                    continue  # 2>&1: the number belongs to the redirection
                self.words += 1
                if self.words > MAX_WORDS:
                    raise ValueError(f"more than {MAX_WORDS:,} words")
                words.append(word)
        return words

    def redirection(self) -> None:
        while not self.at_end() and self.peek() in "<>&":
            self.take()
        while not self.at_end() and self.peek() in _BLANK:
            self.take()
        if not self.at_end() and self.peek() not in _ENDS:
            self.word()

    def word(self) -> Word:
        parts: list[str] = []
        opened: list[str] = []
        start, quoted, bare = self.line, False, ""
        while not self.at_end():
            mark = self.peek()
            if mark in _BLANK or mark in _ENDS or mark in "<>":
                break
            if mark == "'":
                quoted = True
                parts.append(self.until_quote())
            elif mark == '"':
                quoted = True
                self.double_quoted(parts, opened)
            elif mark == "\\":
                self.take()
                if self.peek() == "\r" and self.peek(2) == "\r\n":
                    self.take()
                following = self.take()
                parts.append("" if following == "\n" else following)
            elif (source := self.expansion()) is not None:
                opened.append(source)
                parts.append(source)
                bare = bare or source
            else:
                parts.append(self.take())
        text = "".join(parts)
        alone = text in ("$@", "${@}") or (text.endswith("[@]}") and text.startswith("${"))
        splits = bool(opened) and text == opened[0] and (alone or (bool(bare) and not quoted))
        return Word(text, start, opened[0] if opened else "", splits)

    def until_quote(self) -> str:
        start = self.line
        self.take()
        end = self.text.find("'", self.position)
        if end < 0:
            raise ValueError(f"the quote that opens on line {start} never ends")
        text = self.take(end - self.position)
        self.take()
        return text

    def double_quoted(self, parts: list[str], opened: list[str]) -> None:
        start = self.line
        self.take()
        while not self.at_end():
            mark = self.peek()
            if mark == '"':
                self.take()
                return
            if mark == "\\":
                following = self.peek(2)[1:]
                if following in ('"', "\\", "$", "`"):
                    self.take(2)
                    parts.append(following)
                elif following == "\n":
                    self.take(2)
                else:
                    parts.append(self.take())
            elif (source := self.expansion()) is not None:
                opened.append(source)
                parts.append(source)
            else:
                parts.append(self.take())
        raise ValueError(f"the quote that opens on line {start} never ends")

    def expansion(self) -> str | None:
        """The source text of a variable or a substitution at this place, None if there is none."""
        if self.peek() == "`":
            end = self.text.find("`", self.position + 1)
            if end < 0:
                raise ValueError(f"the ` of line {self.line} never ends")
            return self.take(end + 1 - self.position)
        if self.peek() != "$":
            return None
        following = self.peek(2)[1:]
        if following and following in "({":
            return self.balanced(following)
        if following in _SPECIAL and following:
            return self.take(2)
        length = 1
        while self.text[self.position + length : self.position + length + 1] in _NAME and (
            self.position + length < len(self.text)
        ):
            length += 1
        return self.take(length) if length > 1 else None

    def balanced(self, opening: str) -> str:
        closing, depth, start = {"(": ")", "{": "}"}[opening], 0, self.line
        for index in range(self.position + 1, len(self.text)):
            mark = self.text[index]
            depth += (mark == opening) - (mark == closing)
            if depth == 0:
                return self.take(index + 1 - self.position)
        raise ValueError(f"the ${opening} of line {start} never ends")

"""Shell text is read as a shell reads it, and what a shell would expand stays unknown."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.launch.shell import commands, plain_words

PLAIN = st.text("abcXYZ019-=./_ '\"\\#\n\t{}[]:,*é", max_size=12)


def texts(source: str) -> list[list[str]]:
    return [[word.text for word in command.words] for command in commands(source)]


@settings(deadline=None)
@given(st.lists(PLAIN, min_size=1, max_size=6))
def test_what_shlex_quotes_is_read_back(words):
    found = plain_words("run " + shlex.join(words))
    assert [word.text for word in found] == ["run", *words]
    assert not any(word.open for word in found)


SCRIPTS = [
    "printf '%s\\0' a b\\ c 'd e' \"f g\"",
    "printf '%s\\0' a\\\nb   \\\n  c # not this",
    "printf '%s\\0' \"a\\\"b\" 'c\\d' \"e\\f\" g\\'h",
    "X=1 Y=2 printf '%s\\0' X=3",
    "printf '%s\\0' a#b '#c' --x='{\"k\": [1, 2]}'",
    'printf \'%s\\0\' "two\nlines" "a\\\nb"',
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_that_sh_passes(script):
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    (command,) = commands(script)
    assert [word.text for word in command.words[2:]] == said.split("\0")[:-1]


def test_lists_assignments_exports_and_redirections():
    script = "export A=1\nB=2 run x > log 2>&1 && other <in || third; fourth &\nfifth &> all"
    found = commands(script)
    assert [[w.text for w in c.words] for c in found] == [
        ["run", "x"], ["other"], ["third"], ["fourth"], ["fifth"],
    ]  # fmt: skip
    assert [(n, w.text) for n, w in found[0].assignments] == [("A", "1"), ("B", "2")]
    assert [c.background for c in found] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("word", "opened", "splits"),
    [
        ("$TP", "$TP", True),
        ('"$TP"', "$TP", False),
        ("${TP:-8}", "${TP:-8}", True),
        ("$(nproc)", "$(nproc)", True),
        ("`nproc`", "`nproc`", True),
        ('"$@"', "$@", True),
        ('"${ARGS[@]}"', "${ARGS[@]}", True),
        ("--tp=$TP", "$TP", False),
        ("a$((1+2))b", "$((1+2))", False),
        ("'$TP'", "", False),
        ("\\$TP", "", False),
        ("cost$", "", False),
    ],
)
def test_what_a_shell_would_expand_is_open(word, opened, splits):
    found = plain_words(f"run {word}")[1]
    assert (found.open, found.splits) == (opened, splits)


def test_words_know_their_lines():
    assert [w.line for w in plain_words("a b\\\n c\n'd\ne' f")] == [1, 1, 2, 3, 4]


@pytest.mark.parametrize("text", ["'a", '"a', "a $(b", "a ${b", "`a", '"$(x"'])
def test_what_never_ends_is_said(text):
    with pytest.raises(ValueError, match="never ends"):
        commands(text)


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_gives_commands_or_a_reason(text):
    try:
        found = commands(text)
    except ValueError as error:
        assert str(error)
    else:
        assert all(1 <= word.line <= text.count("\n") + 1 for c in found for word in c.words)


def test_long_hostile_text_is_read_to_its_end():
    pieces = ("$", "a=b ", "\\\n", "'x' ", "$a", '"$a" ', "(", "<a ", "export a=b;", "#\n", "a & ")
    for piece in pieces:
        commands(piece * (40_000 // len(piece)))
    with pytest.raises(ValueError, match="exported variables"):
        commands("".join(f"export a{number}=b\n" for number in range(1_001)))

"""10,000 hostile files per format through `ullage audit` and `ullage size`, under watch.

Each worker process audits and sizes file after file in itself, with an audit hook that notes what
Python does: running a program, compiling or executing text, loading a library, opening a file
outside the case's directory or the installation. Per file: no exception but ullage's own, at most
2 s, the process below 500 MB; a worker that dies or hangs is a fault too.
Writes RESULTS.md beside itself:

    .venv/bin/python benchmarks/fuzz/run.py [--files 10000] [--jobs 2] [--only gguf …]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import platform
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutations import FORMATS, write_case

import ullage

MAX_SECONDS = 2.0
MAX_MB = 500
RESULTS = Path(__file__).with_name("RESULTS.md")
# What reading a file never needs, but for what comes with imports of installed modules (Watch).
FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile",
    "subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind", "socket.getaddrinfo",
    "ctypes.dlopen", "pickle.find_class", "marshal.loads", "code.__new__", "exec", "compile",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink",
    "os.truncate", "shutil.rmtree", "import",
)  # fmt: skip


class Fault(Exception):
    """Something was done that reading a file never needs."""


@dataclass
class Watch:
    """What the audit hook looks at while `on`; `faults` is what it saw."""

    place: str = ""
    on: bool = False
    faults: list[str] = field(default_factory=list)

    def hook(self, event: str, args: tuple[object, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path = args[0]
            if isinstance(path, int):
                return
            full = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
            if not full.startswith(self.place + os.sep) and not _of_installation(full):
                self.faults.append(f"opened {full[:200]}")
            elif isinstance(args[1], str) and any(c in args[1] for c in "wax+"):
                self.faults.append(f"opened {full[:200]} for writing")
        elif event == "import":
            name = str(args[0])
            if name not in sys.modules and not _known_module(name):
                self.faults.append(f"imported {name}")
        elif event in ("exec", "compile"):
            self._executed(event, args)
        elif event == "marshal.loads":
            if not _works_here("importlib._bootstrap_external", "_frozen_importlib_external"):
                self.faults.append("marshal.loads")
        elif event in FORBIDDEN:
            self.faults.append(f"{event} {str(args)[:200]}")

    def _executed(self, event: str, args: tuple[object, ...]) -> None:
        """Code of installed modules is what imports and dataclasses run; all else is a fault."""
        file = getattr(args[0], "co_filename", None) if event == "exec" else args[1]
        if isinstance(file, bytes):
            file = os.fsdecode(file)
        text = str(file)
        if not _of_installation(os.path.realpath(text)) and text not in ("<string>", "<frozen>"):
            self.faults.append(f"{event} of {text[:100]}")
        elif text == "<string>" and not _works_here(*_COMPILERS):
            self.faults.append(f"{event} of a text: {str(args[0])[:100]}")


# Not sys.path: a test runner puts the checkout there, and a checkpoint may lie in it.
_INSTALLED = tuple(
    os.path.realpath(path) + os.sep
    for path in (sys.prefix, sys.base_prefix, Path(ullage.__file__).parent, Path(__file__).parent)
)


def _of_installation(path: str) -> bool:
    return path.startswith(_INSTALLED)


def _known_module(name: str) -> bool:
    return name.split(".")[0] in {*sys.stdlib_module_names, "ullage"}


_COMPILERS = ("dataclasses", "collections", "enum", "typing")
"""Modules of the library that compile text of their own making."""


def _works_here(*modules: str) -> bool:
    """Whether code of one of these modules is at work further up."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "") in modules:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class TooSlow(BaseException):
    """The alarm rang."""


def _ring(*_: object) -> None:
    raise TooSlow


@dataclass(frozen=True)
class Outcome:
    """What one file led to: an exit code, or what went wrong."""

    seed: int
    codes: tuple[int, ...]
    seconds: float
    faults: tuple[str, ...]


def judge(place: Path, kind: str, seed: int, watch: Watch) -> Outcome:
    """Audits and sizes one hostile file in this process."""
    from ullage.cli.main import main as ullage

    path = write_case(place, kind, seed)
    watch.place, watch.faults = os.path.realpath(place), []
    codes, faults = [], []
    began = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS * 5)
    for arguments in (
        ["audit", str(path), "--output", "json", "--fail-on", "never"],
        ["size", str(path), "--gpu", "H100", "--output", "json"],
    ):
        out, err = io.StringIO(), io.StringIO()
        one = time.process_time()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                watch.on = True
                try:
                    code = ullage(arguments)
                finally:
                    watch.on = False
            codes.append(code)
            if code not in (0, 2):
                faults.append(f"{arguments[0]}: exit code {code}")
            elif code == 2 and (len(err.getvalue().splitlines()) != 1 or out.getvalue()):
                faults.append(f"{arguments[0]}: not one sentence: {err.getvalue()[:200]!r}")
            elif code == 0 and not out.getvalue().startswith("{"):
                faults.append(f"{arguments[0]}: no document")
        except TooSlow:
            faults.append(f"{arguments[0]}: hangs")
        except BaseException as error:
            faults.append(f"{arguments[0]}: {type(error).__name__}: {str(error)[:200]}")
        used = time.process_time() - one
        if used > MAX_SECONDS:
            faults.append(f"{arguments[0]}: {used:.1f} s")
    signal.setitimer(signal.ITIMER_REAL, 0)
    faults += [f"did: {fault}" for fault in dict.fromkeys(watch.faults)]
    return Outcome(seed, tuple(codes), time.perf_counter() - began, tuple(faults))


def _peak_mb() -> float:
    """Peak resident memory of this process. ru_maxrss would start at the parent's, across exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def work(connection: Connection, kind: str, seeds: range, scratch: str) -> None:
    """A worker: limits, hook, then file after file, each outcome sent at once."""
    limit = (MAX_MB + 300) << 20  # address space; resident memory is judged below
    resource.setrlimit(resource.RLIMIT_AS, (limit * 4, limit * 4))
    signal.signal(signal.SIGALRM, _ring)
    watch = Watch()
    sys.addaudithook(watch.hook)
    place = Path(scratch) / f"{os.getpid()}"
    for seed in seeds:
        outcome = judge(place, kind, seed, watch)
        peak_mb = _peak_mb()
        connection.send((outcome, peak_mb))
    connection.send("end")


@dataclass
class Total:
    """Everything about one format."""

    kind: str
    files: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    slowest_s: float = 0.0
    peak_mb: float = 0.0
    faults: list[str] = field(default_factory=list)


def fuzz(kind: str, files: int, jobs: int, first_seed: int = 0) -> Total:
    """`files` cases of one format on `jobs` processes."""
    total = Total(kind)
    context = multiprocessing.get_context("spawn")
    step = -(-files // jobs)
    with tempfile.TemporaryDirectory(prefix="ullage-fuzz-") as scratch:
        workers = []
        for number in range(jobs):
            begin = first_seed + number * step
            seeds = range(begin, min(begin + step, first_seed + files))
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(theirs, kind, seeds, scratch))
            process.start()
            theirs.close()
            workers.append((process, mine))
        for message, process in _messages(workers):
            if message is None:
                total.faults.append(f"{kind}: a worker died or hung (exit code {process.exitcode})")
            else:
                _add(total, *message)
    if total.files != files:
        total.faults.append(f"{kind}: {files - total.files} files were not read")
    return total


def _messages(
    workers: list[tuple[SpawnProcess, Connection]],
) -> Iterator[tuple[tuple[Outcome, float] | None, SpawnProcess]]:
    """What the workers send, as it comes; None once for one that ends before its time."""
    left = {connection: process for process, connection in workers}
    while left:
        ready = wait(list(left), timeout=60)
        for connection in ready or list(left):
            assert isinstance(connection, Connection)
            process = left[connection]
            try:
                message = connection.recv() if ready else None
            except (EOFError, OSError):
                message = None
            if message == "end" or message is None:
                del left[connection]
                process.join(5 if message else 0.1)
                process.kill()
                process.join()
            if message != "end":
                yield message, process


def _add(total: Total, outcome: Outcome, peak_mb: float) -> None:
    total.files += 1
    total.codes.update(outcome.codes)
    total.slowest_s = max(total.slowest_s, outcome.seconds)
    if peak_mb > MAX_MB >= total.peak_mb:
        total.faults.append(f"{total.kind}/{outcome.seed}: {peak_mb:.0f} MB")
    total.peak_mb = max(total.peak_mb, peak_mb)
    total.faults += [f"{total.kind}/{outcome.seed}: {fault}" for fault in outcome.faults]


def main() -> int:
    """Fuzz, write the table, and return 1 when anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=tuple(FORMATS), default=[])
    args = parser.parse_args()
    totals = []
    for kind in args.only or FORMATS:
        total = fuzz(kind, args.files, args.jobs, args.seed)
        totals.append(total)
        print(f"{kind}: {total.files} files, {len(total.faults)} faults", file=sys.stderr)
        for fault in total.faults[:20]:
            print(f"  {fault}", file=sys.stderr)
        if not args.only:
            write_results(totals)
    return int(any(total.faults for total in totals))


def write_results(totals: list[Total]) -> None:
    """RESULTS.md, written under another name first."""
    rows = [
        f"| {t.kind} | {t.files:,} | {t.codes[0]:,} | {t.codes[2]:,} | {t.slowest_s:.2f} "
        f"| {t.peak_mb:.0f} | {len(t.faults)} |"
        for t in totals
    ]
    faults = [f"- {fault}" for total in totals for fault in total.faults[:50]]
    text = "\n".join(
        [
            "# Hostile files",
            "",
            "Each file goes through `ullage audit` and `ullage size`. Exit code 0 is a document, 2 "
            "one sentence. A fault is anything else: another exception or exit code, more than "
            f"{MAX_SECONDS:.0f} s of processor time, more than {MAX_MB} MB, a program or text "
            "executed, a module of the checkpoint imported, a file outside the directory opened.",
            "The slowest is wall time of both commands, on a machine that did other things too; "
            "memory is the peak of a worker that had read thousands of them.",
            "Made by `benchmarks/fuzz/run.py`; a case is made again from its format and number.",
            "",
            f"Python {platform.python_version()} · load {os.getloadavg()[0]:.1f} · "
            f"{time.strftime('%Y-%m-%d')}",
            "",
            "| format | files | exit 0 | exit 2 | slowest s | peak MB | faults |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            *faults,
            *([""] if faults else []),
        ]
    )
    fresh = RESULTS.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(RESULTS)


if __name__ == "__main__":
    sys.exit(main())

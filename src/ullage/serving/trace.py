"""A Chrome trace of every step, written as it happens: chrome://tracing and Perfetto read it.

Lanes for the scheduler, the forward pass, the sampler and the hand-over; a span for each phase of
each request; counters of the KV cache. The array form of the format may lack its end, so a file
that a killed server leaves can still be read. What is measured here is `engine` and `loop`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.engine.engine import Engine, StepReport
    from ullage.engine.request import Request

log = logging.getLogger("ullage.serving")
Event = dict[str, Any]
STEPS, REQUESTS = 1, 2
LANES = ("scheduler", "forward", "sample", "deliver")
MICROSECONDS = 1_000_000


def require_writable(path: str | Path) -> None:
    """Raise BadUsage unless a file may be made there; makes none."""
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(path, "no file can be made there")


def _unwritable(path: str | Path, why: str | None) -> BadUsage:
    return BadUsage(f"cannot write it: {why}", file=path, field="--trace")


class NoTrace:
    """What runs when nobody asked for a trace."""

    def step(self, report: StepReport, engine: Engine, handed_s: float, ended_s: float) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass

    def close(self) -> None:
        pass


class Trace:
    """Writes events to a file. Used by the engine's thread only."""

    def __init__(self, path: str | Path) -> None:
        """Raises BadUsage when the file cannot be written."""
        try:
            self._file: TextIO | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise _unwritable(path, error.strerror) from error
        self._path = path
        self._num_written = 0
        self._write(_names())

    def step(self, report: StepReport, engine: Engine, handed_s: float, ended_s: float) -> None:
        """One step, whose tokens were handed over between `handed_s` and `ended_s`."""
        if self._file is not None:
            self._write(_step_events(report, engine, handed_s, ended_s))

    def ended(self, request: Request) -> None:
        """A request that ended, whatever the reason."""
        if self._file is not None:
            self._write(_request_events(request))

    def close(self) -> None:
        """End the list. Safe to repeat."""
        if self._file is not None:
            self._text("\n]\n")
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, events: Iterator[Event]) -> None:
        pieces = []
        for event in events:
            pieces.append(",\n" if self._num_written else "[\n")
            pieces.append(json.dumps(event, separators=(",", ":")))
            self._num_written += 1
        self._text("".join(pieces))

    def _text(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            # A full disk ends the trace, not the service.
            log.warning("the trace %s ends here: %s", self._path, error.strerror)
            with suppress(OSError):
                self._file.close()
            self._file = None


def _names() -> Iterator[Event]:
    for process, name in ((STEPS, "engine"), (REQUESTS, "requests")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for lane, name in enumerate(LANES):
        args = {"name": name}
        yield {"ph": "M", "pid": STEPS, "tid": lane, "name": "thread_name", "args": args}


def _step_events(
    report: StepReport, engine: Engine, handed_s: float, ended_s: float
) -> Iterator[Event]:
    prefills = [work for work in report.plan.work if work.count > 1]
    detail = {
        "tokens": report.plan.num_tokens,
        "prefills": len(prefills),
        "decodes": len(report.plan.work) - len(prefills),
        "preempted": len(report.plan.preempted),
    }
    times = (report.started_s, report.scheduled_s, report.forwarded_s, report.ended_s)
    for lane, name in enumerate(LANES[:3]):
        args = detail if name == "forward" else {}
        yield _span(STEPS, lane, name, times[lane], times[lane + 1], args)
    if report.outputs:
        yield _span(STEPS, 3, "deliver", handed_s, ended_s, {"outputs": len(report.outputs)})
    pool = engine.pool
    for name, values in (
        ("KV blocks", {"used": pool.num_used, "free": pool.num_free}),
        (
            "requests",
            {"running": len(engine.scheduler.running), "waiting": len(engine.scheduler.waiting)},
        ),
    ):
        at = _microseconds(report.ended_s)
        yield {"ph": "C", "pid": STEPS, "name": name, "ts": at, "args": values}


def _request_events(request: Request) -> Iterator[Event]:
    """queued, prefill, decode, as far as it came; async spans of one id share a track."""
    assert request.finished_s is not None
    marks = (request.arrival_s, request.first_scheduled_s, request.first_token_s)
    reason = request.finish_reason
    args = {
        "prompt_tokens": len(request.prompt_ids),
        "cached_tokens": request.num_cached_tokens,
        "output_tokens": len(request.output_ids),
        "preemptions": request.num_preemptions,
        "finish_reason": None if reason is None else reason.value,
    }
    yield from _pair(request.id, "request", request.arrival_s, request.finished_s, args)
    for name, start_s, end_s in zip(
        ("queued", "prefill", "decode"), marks, (*marks[1:], None), strict=True
    ):
        if start_s is not None:
            yield from _pair(request.id, name, start_s, end_s or request.finished_s, {})


def _pair(identity: str, name: str, start_s: float, end_s: float, args: Event) -> Iterator[Event]:
    for phase, at_s in (("b", start_s), ("e", end_s)):
        yield {
            "ph": phase,
            "cat": "request",
            "id": identity,
            "pid": REQUESTS,
            "tid": 0,
            "name": name,
            "ts": _microseconds(at_s),
            **({"args": args} if phase == "b" and args else {}),
        }


def _span(process: int, lane: int, name: str, start_s: float, end_s: float, args: Event) -> Event:
    start = _microseconds(start_s)
    duration = round(_microseconds(end_s) - start, 1)
    event: Event = {"ph": "X", "pid": process, "tid": lane, "name": name, "ts": start}
    return {**event, "dur": duration, **({"args": args} if args else {})}


def _microseconds(at_s: float) -> float:
    return round(at_s * MICROSECONDS, 1)

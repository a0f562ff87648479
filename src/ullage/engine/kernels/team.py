"""Threads that share one compiled function: whoever is there takes the next piece of work.

A phase is over when its pieces are done, not when all threads have come, so a thread that the
system wakes late, or not at all, holds nobody up. Holds the counters and the threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.llvm import atomic_add, atomic_load, atomic_store, give_way

Counters = npt.NDArray[np.int64]

# Where counters lie, each in a cache line of its own (8 words).
_EPOCH, _INSIDE, _PHASES = 0, 8, 16
_WORDS_PER_PHASE = 16
_CLOSED = -1
# About 10 µs of looking before the processor is offered to others: phases are that short, and
# what takes longer is another process's turn.
_LOOKS = 4000


def _enter(counters: Counters, epoch: int) -> bool:
    """Whether the work of `epoch` still goes on; if so, it is not over before `leave`."""
    atomic_add(counters, _INSIDE, 1)
    if atomic_load(counters, _EPOCH) == epoch:
        return True
    atomic_add(counters, _INSIDE, -1)
    return False


def _leave(counters: Counters) -> None:
    atomic_add(counters, _INSIDE, -1)


def _take(counters: Counters, phase: int) -> int:
    """The number of the next piece of `phase` that nobody has."""
    return int(atomic_add(counters, _PHASES + _WORDS_PER_PHASE * phase, 1))


def _finish(counters: Counters, phase: int) -> None:
    """One piece of `phase` is done, and what it wrote can be seen."""
    atomic_add(counters, _PHASES + _WORDS_PER_PHASE * phase + 8, 1)


def _wait(counters: Counters, phase: int, pieces: int) -> None:
    """Until all `pieces` of `phase` are done."""
    looks = 0
    while atomic_load(counters, _PHASES + _WORDS_PER_PHASE * phase + 8) < pieces:
        looks += 1
        if looks > _LOOKS:
            give_way()


def _open(counters: Counters, epoch: int, num_phases: int) -> None:
    counters[_PHASES : _PHASES + _WORDS_PER_PHASE * num_phases] = 0
    atomic_store(counters, _EPOCH, epoch)


def _close(counters: Counters) -> None:
    """Nobody enters from here on, and nobody is inside when this returns."""
    atomic_store(counters, _EPOCH, _CLOSED)
    while atomic_load(counters, _INSIDE) > 0:
        give_way()


enter, leave = compiled(_enter), compiled(_leave)
take, finish, wait = compiled(_take), compiled(_finish), compiled(_wait)
_open_epoch, _close_epoch = compiled(_open), compiled(_close)


class Team:
    """The calling thread and `num_threads` − 1 others, asleep between calls."""

    def __init__(self, num_threads: int, max_phases: int = 4096) -> None:
        self.num_threads = num_threads
        self._max_phases = max_phases
        self._counters = _counters(max_phases)
        self._epoch = 0
        self._busy = threading.Lock()
        self._jobs: list[SimpleQueue[tuple[Callable[..., None], int, tuple[Any, ...]]]] = []
        for index in range(num_threads - 1):
            self._jobs.append(SimpleQueue())
            threading.Thread(
                target=self._serve, args=(self._jobs[-1],), name=f"kernels-{index}", daemon=True
            ).start()
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _go_on_alone(own()))

    def run(self, function: Callable[..., None], num_phases: int, *args: Any) -> None:
        """function(counters, epoch, *args) in every thread that comes in time; this one always.

        The function enters the epoch first and leaves it last. Called while another thread's work
        runs here, the caller does its own alone.
        """
        assert num_phases <= self._max_phases
        if not self._busy.acquire(blocking=False):
            counters = _counters(num_phases)
            _open_epoch(counters, 1, num_phases)
            function(counters, 1, *args)
            return
        try:
            self._epoch += 1
            _open_epoch(self._counters, self._epoch, num_phases)
            for jobs in self._jobs:
                jobs.put((function, self._epoch, args))
            try:
                function(self._counters, self._epoch, *args)
            finally:
                _close_epoch(self._counters)
        finally:
            self._busy.release()

    def _serve(self, jobs: SimpleQueue[tuple[Callable[..., None], int, tuple[Any, ...]]]) -> None:
        while True:
            function, epoch, args = jobs.get()
            if epoch == self._epoch:
                function(self._counters, epoch, *args)
            # Nothing of a finished call is kept alive until the next.
            del function, args


def _go_on_alone(team: Team | None) -> None:
    """In a process that was forked off only the thread that called is left.

    Work put in line for the others would stay there for good, and what one of them was counted in
    for, or held, at that moment would be waited for forever.
    """
    if team is not None:
        team._jobs, team._busy, team._counters = [], threading.Lock(), _counters(team._max_phases)


def _counters(num_phases: int) -> Counters:
    return np.zeros(_PHASES + _WORDS_PER_PHASE * num_phases, np.int64)

"""The server that an experiment measures: the embedded engine, the one at --url, or one that
--serve-command starts. Holds its life and the first requests; loads are `traffic/load.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx2

from ullage.checkup.measure import RunFailed, warm_up
from ullage.errors import BadUsage, Unreachable
from ullage.lab.setting import Setting
from ullage.telemetry.bounded import fetch
from ullage.telemetry.exposition import page_of
from ullage.traffic.embedded import EngineDidNotStart, embedded_engine
from ullage.traffic.load import PlannedRequest, RequestResult, Target, client_for, served_model
from ullage.traffic.prompts import PromptSource, make_prompt

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
DEFAULT_MAX_MODEL_LEN = 2048
"""Where a server does not say its own, what any of today's takes."""


@dataclass(frozen=True, slots=True)
class Served:
    """A warm server: where requests go, what prompts are cut from, the most tokens of a request.

    `what` says in words what was measured.
    """

    target: Target
    prompts: PromptSource
    max_model_len: int
    what: str

    def request(
        self, prompt_tokens: int, output_tokens: int, *, seed: int, arrival_s: float = 0.0
    ) -> PlannedRequest:
        prompt = make_prompt(self.prompts, prompt_tokens, seed=seed)
        return PlannedRequest(arrival_s, prompt, prompt_tokens, output_tokens)


@contextlib.contextmanager
def served(setting: Setting, flags: Mapping[str, int | str] | None = None) -> Iterator[Served]:
    """The server for the length of the `with` block, warm.

    `flags` (vLLM's names without dashes in front, underscores between) are given to the embedded
    engine, or to the command that --serve-command describes; a server at --url alone runs as it
    runs, and `flags` must be empty then.

    Raises Unreachable when it does not start or answer.
    """
    flags = flags or {}
    words = "".join(f" --{name.replace('_', '-')} {value}" for name, value in flags.items())
    if setting.serve_command is not None and flags:
        with _commanded(setting.serve_command, setting.url, flags) as (url, command):
            yield asyncio.run(_warm(url, setting.api_key, command))
    elif setting.url is not None:
        assert not flags, "a running server takes no flags"
        yield asyncio.run(_warm(setting.url, setting.api_key, f"the server at {setting.url}"))
    else:
        arguments = [
            part
            for name, value in flags.items()
            for part in ("--" + name.replace("_", "-"), str(value))
        ]
        try:
            with embedded_engine(str(setting.model), arguments) as engine:
                what = f"the embedded engine, ullage serve{words}"
                yield asyncio.run(_warm(engine.url, None, what))
        except EngineDidNotStart as error:
            raise Unreachable(f"the embedded engine did not start: {error}") from error


async def _warm(url: str, api_key: str | None, what: str) -> Served:
    name, max_model_len = await served_model(url, api_key)
    limit = max_model_len or DEFAULT_MAX_MODEL_LEN
    try:
        target, prompts = await warm_up(Target(url, name, api_key), limit, 0)
    except RunFailed as error:
        raise Unreachable(f"{url}: {error}") from error
    return Served(target, prompts, limit, what)


def require_restarts(setting: Setting, experiment: str, *fields: str) -> None:
    """Raise BadUsage unless the server can be started anew with other flags.

    The embedded engine can; somebody else's only by a --serve-command that has every field.
    """
    if setting.serve_command is None:
        if setting.url is not None:
            raise BadUsage(
                f"{experiment} starts the server again for each value",
                field="--serve-command",
                expected="a command with " + ", ".join(f"{{{field}}}" for field in fields),
            )
        return
    for field in fields:
        if "{" + field + "}" not in setting.serve_command:
            raise BadUsage(
                setting.serve_command[:120],
                field="--serve-command",
                expected=f"{{{field}}} in it, where {experiment} puts its values",
            )


@contextlib.contextmanager
def _commanded(
    template: str, url: str | None, flags: Mapping[str, int | str]
) -> Iterator[tuple[str, str]]:
    """(URL, command) of a server that the template starts; ended with its whole group after."""
    port = _free_port()
    try:
        command = template.format(port=port, **flags)
        arguments = shlex.split(command)
        if not arguments:
            raise ValueError("it is empty")
    except (KeyError, IndexError, ValueError) as error:
        raise BadUsage(
            f"{template[:120]} ({error})",
            field="--serve-command",
            expected="a command with {port} and " + ", ".join(f"{{{name}}}" for name in flags),
        ) from error
    url = url or f"http://127.0.0.1:{port}"
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise BadUsage(
            f"{arguments[:1]} does not start ({error.strerror})", field="--serve-command"
        ) from error
    try:
        _await_answer(process, url)
        yield url, command
    finally:
        _end_group(process)


def _await_answer(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.perf_counter() + START_TIMEOUT_S
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise Unreachable(f"the --serve-command ended with code {process.returncode}")
        try:
            asyncio.run(served_model(url, None))
        except Unreachable as error:
            if "HTTP 401" in str(error):
                return  # it is up; the key comes with the real requests
            time.sleep(0.5)
        else:
            return
    raise Unreachable(f"{url}: the --serve-command did not answer within {START_TIMEOUT_S:.0f} s")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the command and what it started, a while to finish, SIGKILL."""
    import os

    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
        return


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def require_answered(results: tuple[RequestResult, ...], what: str) -> None:
    """Raise Unreachable with the first reason when any request failed: the figures would lie."""
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise Unreachable(f"{what}: {len(failed)} of {len(results)} requests failed: {failed[0]}")


async def metric(target: Target, name: str) -> float | None:
    """The sum of a metric over its labels, or None where the server does not export it."""
    async with client_for(target, timeout_s=5.0, connections=2) as client:
        return await _metric(client, name)


async def _metric(client: httpx2.AsyncClient, name: str) -> float | None:
    try:
        status, body = await fetch(client, "GET", "/metrics", within_s=10.0)
    except httpx2.HTTPError:
        return None
    series = page_of(body).get(name) if status == 200 else {}
    known = [value for value in series.values() if value == value]
    return sum(known) if known else None


class Watch:
    """One metric read over and over inside an `async with`; what was known is in `values`."""

    def __init__(self, target: Target, name: str, interval_s: float = 0.1) -> None:
        self.values: list[float] = []
        self._target, self._name, self._interval_s = target, name, interval_s

    async def __aenter__(self) -> Watch:
        self._client = client_for(self._target, timeout_s=5.0, connections=2)
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._client.aclose()

    async def _look(self) -> None:
        while True:
            value = await _metric(self._client, self._name)
            if value is not None:
                self.values.append(value)
            await asyncio.sleep(self._interval_s)

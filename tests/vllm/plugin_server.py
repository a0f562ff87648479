"""A real vLLM server on loopback with the plugin installed, and what is asked of it.

Holds no opinion. tools/vllm_plugin_server.py starts the servers; the model is a tiny random one
with room for thousands of tokens, so that requests last as long as a test needs them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

LAUNCHER = Path(__file__).parents[2] / "tools" / "vllm_plugin_server.py"
KEY = "secret"
MODEL = "tiny"
BLOCK_SIZE = 32
POSITIONS = 8192
FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--enforce-eager"),
    *("--dtype", "float32", "--max-model-len", "2048", "--block-size", str(BLOCK_SIZE)),
    *("--max-num-batched-tokens", "2048", "--api-key", KEY),
)
CPU = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
ON = {"ULLAGE_VLLM": "1", "VLLM_PLUGINS": "ullage"}
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
TIGHT = ("--num-gpu-blocks-override", "65", "--max-num-seqs", "8")
"""Room for one request of --max-model-len."""
LAYERS, KV_HEADS, HEAD_DIM, BYTES = 2, 2, 32, 4
BYTES_PER_BLOCK = LAYERS * 2 * KV_HEADS * HEAD_DIM * BYTES * BLOCK_SIZE
"""By the configuration alone: keys and values of every layer in float32."""
START_S = 420
"""A start takes 3 to 30 s; the rest is for a machine that is busy with other things."""
PATIENCE_S = 90
"""For what takes a moment on a machine that does nothing else."""


def save_model(folder: Path) -> Path:
    import transformers
    from tests.adapters.live.models import TEXT, TinyModel

    config = {**TEXT, "max_position_embeddings": POSITIONS}
    TinyModel(
        MODEL,
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(**config, tie_word_embeddings=False),
    ).save(folder)
    found = json.loads((folder / "config.json").read_text())
    shape = (LAYERS, KV_HEADS, HEAD_DIM)
    assert (
        found["num_hidden_layers"],
        found["num_key_value_heads"],
        found["head_dim"],
    ) == shape
    return folder


ATTEMPTS = 10


@dataclass
class Servers:
    """One launcher: a server at a time, each stopped by the next."""

    process: subprocess.Popen[str]
    folder: Path
    model: Path
    count: int = 0
    running: Server | None = None

    def start(
        self, flags: Sequence[str], environment: Mapping[str, str], version: str | None = None
    ) -> Server:
        """`version`: what vLLM says that it is, where it is to say something else."""
        self.stop()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.count += 1
        log = self.folder / f"{self.count}.log"
        arguments = ["--model", str(self.model), "--port", str(port), *FLAGS, *flags]
        asked = {"arguments": arguments, "log": str(log), "environment": dict(environment)}
        pid = self.command({**asked, "version": version})["pid"]
        self.running = server = Server(f"http://127.0.0.1:{port}", pid, log)
        server.await_health()
        return server

    def stop(self) -> None:
        if self.running is not None:
            self.running.http.close()
            self.running = None
            self.command({})

    def command(self, value: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError((self.folder / "launcher.log").read_text()[-3000:])
        return dict(json.loads(line))


@contextmanager
def servers(python: Path, model: Path) -> Iterator[Servers]:
    environment = {
        **_without_vllm(),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with tempfile.TemporaryDirectory(prefix="ullage-vllm-plugin-") as folder:
        with (Path(folder) / "launcher.log").open("w") as log:
            process = subprocess.Popen(
                ["nice", "-n", "5", str(python), str(LAUNCHER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        started = Servers(process, Path(folder), model)
        try:
            assert started.answer() == {"ready": True}
            yield started
        finally:
            if started.running is not None:
                started.running.http.close()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@contextmanager
def spawned(
    python: Path, model: Path, flags: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Server]:
    """A server as an operator starts one: every process of it is spawned and imports for itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ullage-vllm-plugin-") as folder:
        log = Path(folder) / "server.log"
        command = ["nice", "-n", "5", str(python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--port", str(port), *FLAGS, *flags]
        with log.open("w") as written:
            process = subprocess.Popen(
                command,
                stdout=written,
                stderr=subprocess.STDOUT,
                env={**_without_vllm(), **CPU, **environment},
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{port}", process.pid, log)
        try:
            server.await_health()
            yield server
        finally:
            server.http.close()
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whoever of its session outlived it


def _without_vllm() -> dict[str, str]:
    """This environment without what someone set for another vLLM."""
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}


@dataclass
class Server:
    """`http` holds the key. Everything that is asked is a new connection's or its own."""

    url: str
    pid: int
    log: Path
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        # None is kept: a server closes what was idle for 5 s, perhaps while it is asked again.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(
            base_url=self.url, headers=headers, timeout=180, trust_env=False, limits=limits
        )

    def await_health(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if not Path(f"/proc/{self.pid}").exists():
                break
            time.sleep(0.2)
        raise AssertionError(self.said()[-4000:])

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kv(self) -> dict[str, Any]:
        return dict(self.http.get("/ullage/kv").raise_for_status().json())

    def metrics(self) -> dict[str, float]:
        """Every series by its name and what its labels say beyond the model and the engine."""
        found = {}
        for line in self.http.get("/metrics").raise_for_status().text.splitlines():
            if line.startswith("#"):
                continue
            name, value = line.rsplit(" ", 1)
            kept = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace(",}", "}")
            found[kept.replace("{}", "")] = float(value)
        return found

    def ask(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> httpx.Response:
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        return self.http.post("/v1/completions", json=body)

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Stream:
        return Stream(self, prompt, max_tokens)

    def pause(self) -> None:
        """Stop the engine between two steps, with what it runs (VLLM_SERVER_DEV_MODE=1)."""
        how = {"mode": "keep", "clear_cache": "false"}
        self.http.post("/pause", params=how).raise_for_status()

    def resume(self) -> None:
        self.http.post("/resume").raise_for_status()

    def streams(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        first_tokens: int = 1,
        of: Callable[[Iterable[bool]], bool] = any,
    ) -> list[Stream]:
        """Streams of these prompts that begin together; the engine is paused and has run a little.

        It runs only until any (or all: `of`) have told `first_tokens`. Where one has ended by then,
        as the machine gave its processors to the engine and not to us, they begin again.
        """
        for _ in range(ATTEMPTS):
            self.pause()
            before = self.kv()
            assert before["running"] == before["waiting"] == 0
            started = [self.stream(prompt, max_tokens) for prompt in prompts]
            eventually(lambda now=started: self.kv()["waiting"] == len(now))
            self.resume()
            eventually(lambda now=started: of(stream.tokens >= first_tokens for stream in now))
            self.pause()
            if self.held() == len(started):
                return started
            self.resume()
            eventually(lambda now=started: all(stream.ended for stream in now))
        raise AssertionError(f"in {ATTEMPTS} attempts a request had ended before it was looked at")

    def held(self) -> int:
        """Requests that every engine has, as the plugin counts them; a step may just be ending."""
        told = None
        while told != (told := [self.kv()[name] for name in ("running", "waiting")]):
            time.sleep(0.2)
        return sum(told)

    def unfinished(self) -> float:
        """Requests that run or wait, by vLLM's own gauges; of a paused engine they stand still."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        told = None
        while told != (told := [self.metrics()[name] for name in names]):
            time.sleep(0.5)
        return sum(told)


class Stream:
    """A streamed completion that is read in a thread, until it ends or is left."""

    def __init__(self, server: Server, prompt: Sequence[int], max_tokens: int) -> None:
        self.prompt, self.tokens, self.reason = tuple(prompt), 0, None
        self.status = 0
        self.ended = False
        self._left = threading.Event()
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"continuous_usage_stats": True, "include_usage": True},
        }
        self._thread = threading.Thread(target=self._read, args=(server, body), daemon=True)
        self._thread.start()

    def _read(self, server: Server, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        with (
            httpx.Client(base_url=server.url, headers=headers, timeout=180, trust_env=False) as own,
            own.stream("POST", "/v1/completions", json=body) as answer,
        ):
            self.status = answer.status_code
            for line in answer.iter_lines():
                if self._left.is_set():
                    return
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.reason = f"error: {event['error']}"
                    continue
                self.tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    self.reason = choice["finish_reason"] or self.reason
        self.ended = True

    def leave(self) -> None:
        self._left.set()
        self._thread.join(30)

    def wait(self, limit_s: float = 180) -> None:
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), "the stream did not end"


def prompt_of(number: int, length: int) -> list[int]:
    """A prompt that shares no block with another number's, whatever the lengths."""
    return [
        4 + (number * 7 + at * (number + 3)) % 150 if at else 4 + number for at in range(length)
    ]


def eventually(check: Any, limit_s: float = PATIENCE_S) -> Any:
    """Wait until `check()` is true; what it was."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        found = check()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"it never came true: {found!r} at last")

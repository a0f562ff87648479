"""A real vLLM server on loopback: adapters in and out at run time, log probabilities of a prompt.

Holds no opinion: `Answer` is what the server said. tools/vllm_lora_server.py starts the servers.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCHER = Path(__file__).parents[3] / "tools" / "vllm_lora_server.py"
BASE = "base"
FLAGS = (
    *("--served-model-name", BASE, "--host", "127.0.0.1", "--enforce-eager", "--enable-lora"),
    *("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "128"),
)
START_S = 180
"""A start takes 4 s on a quiet machine."""


class ServerDied(Exception):
    """The server is gone; the message is the last error of its log."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """One launcher process: starts servers one after the other."""

    process: subprocess.Popen[str]
    folder: Path

    def command(self, value: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError((self.folder / "launcher.log").read_text()[-3000:])
        return json.loads(line)

    @contextmanager
    def serve(self, model: Path, flags: Sequence[str]) -> Iterator[Server]:
        """A server for `model`, up; stopped on leaving.

        Raises: ServerDied when it does not start.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = self.folder / f"{model.name}-{port}.log"
        arguments = ["--model", str(model), "--port", str(port), *FLAGS, *flags]
        pid = self.command({"arguments": arguments, "log": str(log)})["pid"]
        server = Server(port, pid, log)
        try:
            server.await_health()
            yield server
        finally:
            self.command({})


@contextmanager
def launcher(python: Path) -> Iterator[Launcher]:
    """A launcher in vLLM's environment; it and whatever it started end on leaving."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="ullage-vllm-lora-") as folder:
        with (Path(folder) / "launcher.log").open("w") as log:
            process = subprocess.Popen(
                ["nice", "-n", "5", str(python), str(LAUNCHER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        started = Launcher(process, Path(folder))
        try:
            assert started._answer() == {"ready": True}
            yield started
        finally:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    pid: int
    log: Path

    def await_health(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if not self.alive():
                raise ServerDied(self.last_error())
            try:
                if self._call("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise ServerDied(f"no answer in {START_S} s\n{self.log.read_text()[-2000:]}")

    def alive(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def last_error(self) -> str:
        """The first exception that a process of the server names: the root of what follows."""
        said = _exceptions(self.log.read_text(errors="replace"))
        return said[0] if said else self.log.read_text(errors="replace")[-2000:]

    def raised(self) -> str | None:
        """The kind of the exception that a worker named since the last answered request."""
        answered = self.log.read_text(errors="replace").split('"POST /v1/')
        said = _exceptions(answered[-1] if answered[-1].count("\n") > 3 else answered[-2])
        return said[0].partition(":")[0] if said else None

    def load(self, name: str, adapter: Path, switches: Sequence[str] = ()) -> str | None:
        """Load an adapter; the message when the server refuses it."""
        body = {"lora_name": name, "lora_path": str(adapter), **dict.fromkeys(switches, True)}
        status, text = self._call("POST", "/v1/load_lora_adapter", body)
        if status == 200:
            return None
        return str(json.loads(text)["error"]["message"])

    def unload(self, name: str) -> None:
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def logprobs(self, model: str, prompt: Sequence[int]) -> list[float]:
        """Log probability of each prompt token but the first.

        Raises: ServerDied when the request brings the server down.
        """
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        status, text = self._call("POST", "/v1/completions", body)
        if status != 200:
            raise ServerDied(self.last_error())
        said = json.loads(text)["choices"][0]["prompt_logprobs"]
        return [
            values[str(token)]["logprob"]
            for token, values in zip(prompt[1:], said[1:], strict=True)
        ]

    def scores(self, model: str, prompt: Sequence[int]) -> list[float]:
        """A classifier's logits.

        Raises: ServerDied when the request brings the server down.
        """
        body = {"model": model, "input": list(prompt), "use_activation": False}
        status, text = self._call("POST", "/classify", body)
        if status != 200:
            raise ServerDied(f"{self.last_error()}\n{text}")
        return list(json.loads(text)["data"][0]["probs"])

    def adapted(self) -> list[str]:
        """The served modules that the last load filled, as vLLM's log names them."""
        said = self.log.read_text(errors="replace").rpartition("Activating LoRA. int id:")[2]
        return re.findall(r"Successfully loaded LoRA weights for module (\S+)\.\n", said)

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def _exceptions(log: str) -> list[str]:
    """The `SomeError: why` lines of the processes, in order."""
    found = []
    for line in log.splitlines():
        said = re.search(
            r" ERROR \S+ \S+ \[[^\]]*\] (\w+(?:Error|Exception|Iteration)(:.*|$))", line
        )
        if said is not None:
            found.append(said[1])
    return found

"""A photograph of real engines: `python -m tests.watch.web.living FILE.png [SECONDS]`.

Three embedded engines on a tiny model under load, watched by `ullage watch --web`. Half-way one of
them is started anew with a sixth of its KV memory, as a mistaken flag would do. The picture is the
page's upper part, down to the second row of charts.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2

from tests.engine.families import write_model
from tests.watch.web import chrome
from ullage.watch.web.feed import id_of

MODEL = "tiny-llama"
ROOMY, SMALL = 2 << 20, 320 << 10
UPPER_PART = "document.getElementById('chart-ttft').getBoundingClientRect().bottom + scrollY + 12"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def ullage(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """One of ullage's verbs while the block lasts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ullage", *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def engine(model: Path, port: int, kv_bytes: int) -> contextlib.AbstractContextManager[object]:
    return ullage(
        "serve", str(model), "--port", str(port), "--served-model-name", MODEL,
        "--kv-cache-memory-bytes", str(kv_bytes), "--max-num-seqs", "8", "--max-model-len", "384",
        "--max-num-queued-reqs", "64", "--shutdown-timeout", "1",
    )  # fmt: skip


def wait_for(url: str) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with contextlib.suppress(httpx2.HTTPError):
            httpx2.get(f"{url}/health").raise_for_status()
            return
        time.sleep(0.3)
    raise TimeoutError(url)


def client(url: str, stop: threading.Event, seed: int) -> None:
    """One user: a shared beginning, a question, an answer, a pause."""
    draw = random.Random(seed)  # noqa: S311
    beginning = [draw.randrange(3, 200) for _ in range(64)]
    while not stop.is_set():
        question = [draw.randrange(3, 200) for _ in range(draw.randrange(8, 60))]
        length = draw.randrange(80, 220)
        body = {"model": MODEL, "prompt": beginning + question, "max_tokens": length}
        with contextlib.suppress(httpx2.HTTPError):
            httpx2.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=60)
        stop.wait(draw.expovariate(1 / 2.5))


def main(path: Path, seconds: float) -> None:
    ports = [free_port() for _ in range(3)]
    page_port = free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = write_model("llama", Path(folder))
        first = contextlib.ExitStack()
        stack.callback(stop.set)
        stack.enter_context(first)
        for i, port in enumerate(ports):
            (first if i == 1 else stack).enter_context(engine(model, port, ROOMY))
        for url in urls:
            wait_for(url)
        for i, url in enumerate(urls):
            for user in range(5 + i):
                thread = threading.Thread(target=client, args=(url, stop, 10 * i + user))
                thread.daemon = True
                thread.start()
        time.sleep(5)
        stack.enter_context(ullage("watch", *urls, "--interval", "2", "--web", f":{page_port}"))
        time.sleep(seconds / 2)
        first.close()
        stack.enter_context(engine(model, ports[1], SMALL))
        wait_for(urls[1])
        time.sleep(seconds / 2)
        with chrome.browser(within_s=60) as page:
            page.look(1180, still=True)
            page.open(f"http://127.0.0.1:{page_port}/#replica={id_of(urls[1])}")
            page.wait("document.querySelectorAll('#figures tr').length > 3")
            height = int(page.evaluate(UPPER_PART))
            page.photograph(path, height=height)
            print(page.text("#verdict"), page.complaints())


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 300.0)

"""A tiny OpenAI-compatible server for tests, on a thread, that can misbehave on purpose.

It speaks just enough HTTP/1.1. What goes wrong is chosen by the first prompt token id: see FAULTS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

FAULTS = {
    501: "answer HTTP 500",
    502: "drop the connection before any header",
    503: "drop the connection after two tokens",
    504: "send a token, then nothing for ever",
    505: "end the stream without a finish reason",
    506: "send an event that is not JSON",
    507: "report an error inside the stream",
    508: "end properly without a single token",
    509: "send every token as empty text, the last with the finish reason",
    510: "send all tokens as text, then an empty event with the finish reason",
}
BLOCK_SIZE = 16
NUM_BLOCKS = 200
BYTES_PER_TOKEN = 1000


@dataclass
class FakeServer:
    """Settings and what was seen. `token_s` is the pause between tokens, `first_s` before them."""

    first_s: float = 0.01
    token_s: float = 0.002
    tokenizes: bool = True
    takes_ignore_eos: bool = True
    takes_ids: bool = True
    usage: bool = True
    metrics: bool = True
    bytes_metrics: bool = True
    max_model_len: int = 512
    num_blocks: int = NUM_BLOCKS
    block_size: int = BLOCK_SIZE
    # A line as a real server exports it, in the place of the one made up here.
    cache_info: str = ""
    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)
    generated: int = 0

    def page(self) -> str:
        blocks = sum(-(-tokens // self.block_size) for tokens in self.running.values())
        lines = [
            "# HELP vllm:kv_cache_usage_perc share",
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="fake"}} {blocks / self.num_blocks}',
            f'vllm:num_requests_running{{engine="0"}} {len(self.running)}',
            'vllm:num_requests_waiting{engine="0"} 0',
            'vllm:num_preemptions_total{engine="0"} 0',
            f'vllm:generation_tokens_total{{engine="0"}} {self.generated}',
            self.cache_info
            or f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",num_gpu_blocks="{NUM_BLOCKS}",'
            f'kv_cache_size_tokens="{BLOCK_SIZE * NUM_BLOCKS}",cache_dtype="auto"}} 1.0',
        ]
        if self.bytes_metrics:
            block = BLOCK_SIZE * BYTES_PER_TOKEN
            lines += [
                f"ullage_kv_cache_used_bytes {blocks * block}",
                f"ullage_kv_cache_total_bytes {NUM_BLOCKS * block}",
            ]
        return "\n".join(lines) + "\n"


@contextlib.contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Run `server` on a free loopback port; `server.url` says where."""
    ready = threading.Event()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        listener = await asyncio.start_server(lambda r, w: _handle(server, r, w), "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listener.close()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(5.0)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5.0)
        loop.close()


async def _handle(
    server: FakeServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, path, _ = head.split(" ", 2)
            length = next(
                (
                    int(line.split(":")[1])
                    for line in head.lower().split("\r\n")
                    if line.startswith("content-length:")
                ),
                0,
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            if path == "/v1/completions" and method == "POST":
                await _complete(server, writer, body)
                return
            _answer(server, writer, path, body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        pass
    finally:
        writer.close()


def _answer(server: FakeServer, writer: asyncio.StreamWriter, path: str, body: dict) -> None:
    if path == "/v1/models":
        entry = {"id": "fake", "max_model_len": server.max_model_len}
        _send(writer, 200, json.dumps({"data": [entry]}))
    elif path == "/metrics" and server.metrics:
        _send(writer, 200, server.page())
    elif path == "/tokenize" and server.tokenizes:
        words = body["prompt"].split()
        _send(writer, 200, json.dumps({"tokens": [1000 + len(w) for w in words]}))
    else:
        _send(writer, 404, "{}")


def _send(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    data = text.encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


async def _complete(server: FakeServer, writer: asyncio.StreamWriter, body: dict) -> None:
    server.bodies.append(body)
    prompt = body["prompt"]
    if "ignore_eos" in body and not server.takes_ignore_eos:
        return _send(writer, 400, '{"error": "unknown field ignore_eos"}')
    if not isinstance(prompt, str) and not server.takes_ids:
        return _send(writer, 400, '{"error": "prompt must be a string"}')
    fault = prompt[0] if not isinstance(prompt, str) else 0
    if fault == 501:
        return _send(writer, 500, "boom\x00\n<script>")
    if fault == 502:
        writer.transport.abort()
        return None
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    key = id(writer)
    tokens = len(prompt) if not isinstance(prompt, str) else len(prompt.split())
    server.running[key] = tokens
    try:
        await asyncio.sleep(server.first_s)
        await _stream(server, writer, body, fault, key)
        await writer.drain()
    finally:
        del server.running[key]
    return None


async def _stream(
    server: FakeServer, writer: asyncio.StreamWriter, body: dict, fault: int, key: int
) -> None:
    prompt_tokens, count = server.running[key], body["max_tokens"]
    for i in range(0 if fault == 508 else count):
        if fault == 503 and i == 2:
            return writer.transport.abort()
        if fault == 504 and i == 1:
            await asyncio.sleep(3600)
        if fault == 506 and i == 1:
            _event(writer, "{not json")
        if fault == 507 and i == 1:
            _event(writer, json.dumps({"error": {"message": "out of memory"}}))
        server.generated += 1
        server.running[key] += 1
        last = i == count - 1 and fault != 505
        text = "" if fault == 509 else "a "
        choice = {"text": text, "finish_reason": "length" if last and fault != 510 else None}
        _event(writer, json.dumps({"choices": [choice]}))
        await writer.drain()
        await asyncio.sleep(server.token_s)
    if fault == 505:
        return None
    if fault == 510:
        _event(writer, json.dumps({"choices": [{"text": "", "finish_reason": "length"}]}))
    if server.usage and body.get("stream_options", {}).get("include_usage"):
        used = {"prompt_tokens": prompt_tokens, "completion_tokens": 0 if fault == 508 else count}
        _event(writer, json.dumps({"choices": [], "usage": used}))
    _event(writer, "[DONE]")
    return None


def _event(writer: asyncio.StreamWriter, payload: str) -> None:
    writer.write(f"data: {payload}\n\n".encode())

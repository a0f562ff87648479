"""What it costs to read 1,000 replicas through Prometheus' API: processor time and memory.

A process of its own answers as Prometheus does, with a recorded full-size vLLM page under every
replica's name, all of them scraped anew before each look (the worst case: as often as is looked).
It prints a row for RESULTS.md; only the reading process is measured.

    python benchmarks/watch/through_prometheus.py [--num 1000] [--looks 6] [--page FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import re
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "tests" / "telemetry" / "pages" / "vllm-0.32-overload.prom"
NAME = b"@@"
JOB = "vllm"


def rows_of(page: bytes) -> bytes:
    """The page's samples as rows of an instant query's answer, of an instance called NAME."""
    from prometheus_client.parser import text_string_to_metric_families

    from ullage.telemetry.promql_text import page_names

    asked_for = re.compile(json.loads(page_names()))
    rows = []
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if asked_for.fullmatch(sample.name):
                labels = {"__name__": sample.name, **sample.labels}
                labels |= {"job": JOB, "instance": NAME.decode()}
                row = {"metric": dict(sorted(labels.items())), "value": [0, f"{sample.value:g}"]}
                rows.append(json.dumps(row, separators=(",", ":")))
    return ",".join(rows).encode()


def serve(num: int, page: Path) -> None:
    template = rows_of(page.read_bytes())
    names = [f"10.0.{i // 250}.{i % 250}:8000" for i in range(num)]

    def vector(rows: list[bytes]) -> bytes:
        inner = b",".join(rows)
        return b'{"status":"success","data":{"resultType":"vector","result":[' + inner + b"]}}"

    def labelled(value: float, name: str = "") -> bytes:
        labels = {"job": JOB, "instance": NAME.decode(), **({"__name__": name} if name else {})}
        row = json.dumps({"metric": labels, "value": [0, repr(value)]}).encode()
        return vector([row.replace(NAME, one.encode()) for one in names])

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            query = dict(urllib.parse.parse_qsl(text))["query"]
            if query == "vector(time())":
                now = json.dumps({"metric": {}, "value": [0, repr(time.time())]})
                body = vector([now.encode()])
            elif query.startswith("timestamp("):
                body = labelled(time.time())
            elif '__name__="up"' in query:
                body = labelled(1.0, "up")
            elif "last_over_time" in query:
                body = labelled(1.0)
            else:
                chosen = re.search(r'instance=~"([^"]*)"', query)
                assert chosen
                wanted = chosen[1].replace("\\\\", "").split("|")
                body = vector([template.replace(NAME, one.encode()) for one in wanted])
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], template.count(b'"metric"'), flush=True)
    server.serve_forever()


async def read(port: int, looks: int) -> tuple[list[float], list[float], int]:
    """(CPU seconds, wall seconds) of each look, and how many replicas were read."""
    from ullage.telemetry.promql import PrometheusSource

    source = PrometheusSource(f"http://127.0.0.1:{port}")
    used, took, num = [], [], 0
    try:
        for _ in range(looks):
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            found = await source.look()
            used.append(time.process_time() - cpu_s)
            took.append(time.perf_counter() - wall_s)
            num = sum(1 for look in found if look.snapshot is not None)
    finally:
        await source.close()
    return used, took, num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--looks", type=int, default=6)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.num, args.page)
        return
    command = [
        sys.executable,
        __file__,
        "--serve",
        "--num",
        str(args.num),
        "--page",
        str(args.page),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as api:
        try:
            assert api.stdout
            port, num_series = map(int, api.stdout.readline().split())
            used, took, num = asyncio.run(read(port, args.looks))
        finally:
            api.terminate()
    status = Path("/proc/self/status").read_text()
    high = re.search(r"VmHWM:\s+(\d+)", status)
    later = used[1:] or used
    print(
        f"| {num} | {num_series} | {sum(later) / len(later):.2f} | {max(took):.1f} | "
        f"{int(high[1]) / 1024 if high else 0:.0f} |"
    )


if __name__ == "__main__":
    main()

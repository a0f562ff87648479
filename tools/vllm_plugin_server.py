"""Starts real vLLM API servers (CPU), one after the other, with what an operator sets around them.

Run with the Python of vLLM's own environment (tools/vllm_setup.sh). The commands are those of
vllm_lora_server.py, each with its own "environment": {"NAME": "value"} and, if vLLM is to say that
it is another, "version". With `--api-server-count` among the arguments vLLM's several API processes
are started, each of them by spawning as vLLM does; everything else forks, so that a start takes
seconds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import vllm_lora_server as launcher

    for name in ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_LOGGING_LEVEL"):
        os.environ.pop(name, None)
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM prints on stdout; answers alone belong there
    launcher.prepare()
    launcher.fork_instead_of_spawning()
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.v1.engine.core  # each imported once, for all servers
    import vllm.v1.worker.cpu_worker  # noqa: F401

    launcher.answer(answers, {"ready": True})
    server = None
    for line in sys.stdin:
        command = json.loads(line)
        if server is not None:
            launcher.stop(server)
            server = None
        if command:
            server = start(launcher, command)
        launcher.answer(answers, {"pid": server})
    if server is not None:
        launcher.stop(server)


def start(launcher: Any, command: dict[str, Any]) -> int:
    """Fork a server; the child's id. `vllm_lora_server.start` with an environment."""
    import vllm.entrypoints.launchers.api_server.entry as entry
    import vllm.version

    before = dict(os.environ), entry.main, vllm.version.__version__
    os.environ.update(command["environment"])
    vllm.version.__version__ = command.get("version") or vllm.version.__version__
    if "--api-server-count" in command["arguments"]:
        entry.main = several_api_processes
    try:
        return int(launcher.start(command["arguments"], Path(command["log"])))
    finally:
        os.environ.clear()
        os.environ.update(before[0])
        entry.main, vllm.version.__version__ = before[1:]


def several_api_processes() -> None:
    """`vllm serve … --api-server-count N`, without the command that looks for a package `vllm`."""
    from vllm.entrypoints.cli.serve import run_multi_api_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    run_multi_api_server(args)


if __name__ == "__main__":
    main()

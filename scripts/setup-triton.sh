#!/usr/bin/env bash
# Makes the environment for the tests of GPU kernels in Triton's interpreter: .venv-triton, or
# $TRITON_VENV. One of its own: where vLLM finds Triton, it believes that there is a GPU.
#
#   scripts/setup-triton.sh      nothing left to do: returns at once
#
# PYTHON and TORCH_INDEX as in setup.sh.
set -euo pipefail
VENV=${TRITON_VENV:-.venv-triton}
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up "triton" "a minute" "Triton and what the tests need" install_torch

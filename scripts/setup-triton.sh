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

setup_triton() {
    local wanted
    wanted=$(cat requirements/triton.txt scripts/setup.sh scripts/setup-triton.sh | sha256sum | cut -d' ' -f1)
    [[ ! -x $VENV/bin/python || ! -f $STAMP || $(<"$STAMP") != "$wanted" ]] || exit 0
    say "setting up $VENV (a first time usually takes a minute)"
    make_venv
    install_torch
    step "installing Triton and what the tests need" "30 s" \
        pip install -q --no-deps -r requirements/triton.txt
    echo "$wanted" >"$STAMP"
    say "ready: $VENV"
}

setup_triton

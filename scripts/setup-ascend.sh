#!/usr/bin/env bash
# Makes the environment of the published vLLM-Ascend on an emulated NPU: .venv-ascend, or
# $ASCEND_VENV, over that of the vLLM that its wheel is for (.venv-0.23.0, or $OLDER), which it makes
# first. Compiles the device (tests/emulated_npu/device.cpp) once.
#
#   scripts/setup-ascend.sh      nothing left to do: returns at once
#
# PYTHON and TORCH_INDEX as in setup.sh; vLLM-Ascend's wheel is for Python 3.11 alone.
set -euo pipefail
HERE=$(dirname "${BASH_SOURCE[0]}")
VLLM_ASCEND=0.23.0
OLDER=${OLDER:-.venv-$VLLM_ASCEND}
PYTHON=${PYTHON:-python3.11}
VENV=$OLDER VLLM_VERSION=$VLLM_ASCEND PYTHON=$PYTHON "$HERE/setup.sh"
VENV=${ASCEND_VENV:-.venv-ascend}
source "$HERE/setup.sh"
DEVICE=tests/emulated_npu

folder_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))'; }

compile_device() {
    local torch include
    torch=$(folder_of "$OLDER")/torch
    include=$("$OLDER/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    g++ -O1 -w -shared -fPIC -std=c++20 -DTORCH_EXTENSION_NAME=_npu_device \
        -I"$torch/include" -I"$torch/include/torch/csrc/api/include" -I"$include" \
        "$DEVICE/device.cpp" -o "$(folder_of "$VENV")/_npu_device.so" \
        -L"$torch/lib" -lc10 -ltorch_cpu -ltorch_python -Wl,-rpath,"$torch/lib"
}

wanted=$(cat requirements/ascend.txt scripts/setup-ascend.sh "$OLDER/.kvpool-setup" "$DEVICE/device.cpp" | sha256sum | cut -d' ' -f1)
[[ ! -x $VENV/bin/python || ! -f $STAMP || $(<"$STAMP") != "$wanted" ]] || exit 0
say "setting up $VENV (a first time usually takes 40 s)"
command -v g++ >/dev/null || apt g++ || die "needs g++ to compile the emulated device; none found"
make_venv
# The other environment's packages and hooks, then the emulated torch_npu, whose entry point torch
# finds in every process.
printf 'import site; site.addsitedir("%s")\n%s\n' "$(realpath "$(folder_of "$OLDER")")" "$PWD/$DEVICE" \
    >"$(folder_of "$VENV")/kvpool_npu.pth"
step "installing vLLM-Ascend" "10 s" pip install -q --no-deps --require-hashes -r requirements/ascend.txt
step "compiling the emulated device" "20 s" compile_device
echo "$wanted" >"$STAMP"
say "ready: $VENV"

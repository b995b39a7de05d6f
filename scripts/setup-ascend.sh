#!/usr/bin/env bash
# Makes the environment of a published vLLM-Ascend on an emulated NPU: .venv-ascend-0.23.0, or
# $ASCEND_VENV. It lies over the environment of the vLLM that the wheel is for (.venv-0.23.0, or
# $ASCEND_BASE), which is made first. Compiles the device (tests/emulated_npu/device.cpp) and what it
# needs of CANN (cann.cpp) once.
#
#   scripts/setup-ascend.sh      nothing left to do: returns at once
#   ASCEND=0.26.0rc1             another release, of which requirements/ascend-RELEASE.txt has the wheel
#
# PYTHON and TORCH_INDEX as in setup.sh; vLLM-Ascend's wheel is for Python 3.11 alone.
set -euo pipefail
HERE=$(dirname "${BASH_SOURCE[0]}")
ASCEND=${ASCEND:-0.23.0}
WHEEL=requirements/ascend-$ASCEND.txt
[[ -f $HERE/../$WHEEL ]] || { printf 'setup: ASCEND=%s: there is no %s\n' "$ASCEND" "$WHEEL" >&2; exit 1; }
VLLM=${ASCEND%rc*}
OF_VLLM=${ASCEND_BASE:-.venv-$VLLM}
PYTHON=${PYTHON:-python3.11}
VENV=$OF_VLLM VLLM_VERSION=$VLLM PYTHON=$PYTHON "$HERE/setup.sh"
VENV=${ASCEND_VENV:-.venv-ascend-$ASCEND}
source "$HERE/setup.sh"
DEVICE=tests/emulated_npu

folder_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))'; }

compile_device() {
    local torch include to name
    torch=$(folder_of "$OF_VLLM")/torch
    include=$("$OF_VLLM/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    to=$(folder_of "$VENV")
    # Mooncake's wheel loads CANN by these names: one library has what is emulated, the others nothing.
    g++ -O1 -shared -fPIC -std=c++20 "$DEVICE/cann.cpp" -Wl,-soname,libascendcl.so -o "$to/libascendcl.so"
    for name in llm_datadist metadef; do
        g++ -shared -fPIC -x c++ /dev/null -Wl,-soname,"lib$name.so" -o "$to/lib$name.so"
    done
    g++ -O1 -w -shared -fPIC -std=c++20 -DTORCH_EXTENSION_NAME=_npu_device \
        -I"$torch/include" -I"$torch/include/torch/csrc/api/include" -I"$include" \
        "$DEVICE/device.cpp" -o "$to/_npu_device.so" -L"$torch/lib" -lc10 -ltorch_cpu -ltorch_python \
        -L"$to" -Wl,--no-as-needed -lascendcl -lllm_datadist -lmetadef -Wl,-rpath,"$torch/lib:\$ORIGIN"
}

wanted=$(cat "$WHEEL" scripts/setup-ascend.sh "$OF_VLLM/.kvpool-setup" "$DEVICE"/*.cpp | sha256sum | cut -d' ' -f1)
[[ ! -x $VENV/bin/python || ! -f $STAMP || $(<"$STAMP") != "$wanted" ]] || exit 0
say "setting up $VENV (a first time usually takes 40 s)"
command -v g++ >/dev/null || apt g++ || die "needs g++ to compile the emulated device; none found"
make_venv
# The other environment's packages and hooks, then the emulated torch_npu, whose entry point torch
# finds in every process.
printf 'import site; site.addsitedir("%s")\n%s\n' "$(realpath "$(folder_of "$OF_VLLM")")" "$PWD/$DEVICE" \
    >"$(folder_of "$VENV")/kvpool_npu.pth"
step "installing vLLM-Ascend $ASCEND and Mooncake for NPUs" "15 s" pip_install --require-hashes -r "$WHEEL"
step "compiling the emulated device" "20 s" compile_device
echo "$wanted" >"$STAMP"
say "ready: $VENV"

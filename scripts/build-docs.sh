#!/usr/bin/env bash
# Builds the documents' site in build/site, from all documents and what they link to; needs
# scripts/setup-tools.sh. An error: a link or an anchor that leads nowhere, a document that mkdocs.yml
# does not name.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SOURCE=build/site-source
rm -rf "$SOURCE"
mkdir -p "$SOURCE"
# Documents, the files of examples and configurations, and pictures.
git ls-files -z -- '*.md' configs examples 'docs/*.svg' docs/site.css 'benchmarks/*.svg' \
    ':!examples/demo_guide.md' ':!tests' | xargs -0 cp --parents -t "$SOURCE"
NO_MKDOCS_2_WARNING=1 "${TOOLS_VENV:-.venv-tools}/bin/mkdocs" build

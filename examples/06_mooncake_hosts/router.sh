#!/usr/bin/env bash
# The router, on ROUTER_HOST. Usage: router.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
set -a # router.toml takes its ${NAMES} from the environment
# shellcheck source=hosts.env
. "$here/hosts.env"
set +a
umask 077
mkdir -p "$STATE_DIR"
if [[ ! -s $STATE_DIR/admin-token ]]; then
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$STATE_DIR/admin-token"
fi
exec "$KVPOOL" router --config "$here/router.toml"

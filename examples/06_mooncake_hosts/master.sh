#!/usr/bin/env bash
# Mooncake's master, on MASTER_HOST. Usage: master.sh
set -euo pipefail
# shellcheck source=hosts.env
. "$(dirname "${BASH_SOURCE[0]}")/hosts.env"
# Milliseconds; must outlast a transfer.
exec "$MOONCAKE_MASTER" --rpc_address="$MASTER_HOST" --rpc_port="$MASTER_PORT" \
    --default_kv_lease_ttl=11000

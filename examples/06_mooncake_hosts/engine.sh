#!/usr/bin/env bash
# One engine, on the host that has it. Usage: engine.sh prefill|decode ADDRESS [ARGUMENT OF VLLM]...
set -euo pipefail
# shellcheck source=hosts.env
. "$(dirname "${BASH_SOURCE[0]}")/hosts.env"
usage="usage: $0 prefill|decode ADDRESS [ARGUMENT OF VLLM]..."
role=${1:?$usage}
address=${2:?$usage}
shift 2
case $role in
    prefill) tp=$PREFILL_TP ;;
    decode) tp=$DECODE_TP ;;
    *)
        echo "$usage" >&2
        exit 2
        ;;
esac
exec "$VLLM" serve "$MODEL" --host "$address" --port "$ENGINE_PORT" \
    --tensor-parallel-size "$tp" --shutdown-timeout "$SHUTDOWN_TIMEOUT_S" \
    --kv-transfer-config "$KV_TRANSFER_CONFIG" "$@"

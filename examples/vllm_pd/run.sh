#!/usr/bin/env bash
# A prefill server, a decode server and the proxy before them, until Ctrl-C. The daemon runs already.
#
#   examples/vllm_pd/run.sh MODEL [options of vLLM]
set -euo pipefail
here=$(dirname "$0")
model=${1:?usage: run.sh MODEL [options of vLLM]}
shift
python=${PYTHON:-python3}
transfer='{"kv_connector": "KVStoreConnector", "kv_connector_module_path": "connectors.vllm",'
transfer+=' "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 0' INT TERM

server() { # PORT GPU
    CUDA_VISIBLE_DEVICES=$2 exec "$python" -m vllm.entrypoints.openai.api_server --model "$model" --port "$1" \
        --kv-transfer-config "$transfer" "${@:3}"
}

server "${PREFILL_PORT:-8100}" "${PREFILL_GPU:-0}" "$@" &
server "${DECODE_PORT:-8200}" "${DECODE_GPU:-0}" "$@" &
"$python" "$here/proxy.py" --port "${PROXY_PORT:-8000}" \
    --prefill "http://127.0.0.1:${PREFILL_PORT:-8100}" --decode "http://127.0.0.1:${DECODE_PORT:-8200}" &
wait -n # one that ends takes the others with it

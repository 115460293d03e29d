#!/bin/sh
# A trained model behind an OpenAI-compatible API, with vLLM (pip install vllm; needs a GPU):
#
#   resources/serve/vllm.sh results/dpo/demo/model [options of `vllm serve`]
#
# A model folder that holds an adapter alone is served upon its base; the API knows it by the name `adapter`:
#
#   BASE=Qwen/Qwen2.5-0.5B resources/serve/vllm.sh results/sft/support/model
#
# It answers on this machine alone: http://127.0.0.1:8000/v1
set -eu
model=${1:?name a model folder of results, or a repository on the Hub}
shift
if [ -z "${BASE:-}" ]; then
    exec vllm serve "$model" --host 127.0.0.1 --port "${PORT:-8000}" "$@"
fi
# vLLM makes room for adapters of one of these ranks.
rank=$(python3 -c 'import json, sys
rank = json.load(open(sys.argv[1]))["r"]
print(next(room for room in (8, 16, 32, 64, 128, 256, 320, 512) if room >= rank))' "$model/adapter/adapter_config.json")
exec vllm serve "$BASE" --tokenizer "$model" --enable-lora --lora-modules "adapter=$model/adapter" --max-lora-rank "$rank" \
    --host 127.0.0.1 --port "${PORT:-8000}" "$@"

#!/bin/sh
# A GGUF file behind an OpenAI-compatible API and a page, with llama.cpp's server, on a CPU or a GPU:
#
#   resources/serve/llama_server.sh results/convert/demo/gguf/model-q8_0.gguf [options of llama-server]
#
# It answers on this machine alone: http://127.0.0.1:8080
set -eu
file=${1:?name a GGUF file, as `snakemake gguf` writes them}
shift
exec llama-server --model "$file" --jinja --host 127.0.0.1 --port "${PORT:-8080}" "$@"

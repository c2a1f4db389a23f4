#!/usr/bin/env bash
# All ways of serving on one GPU, in one run, on SmolLM2 (small) or in its 8B shape (inflated):
#   headline.sh KEEP_DIR OUT_DIR PROMPTS.jsonl small|inflated [OPTIONS OF serving.py]
# KEEP_DIR is an unpacked stack (keep.sh). OUT_DIR receives SIZE.json, SIZE.log and the servers' logs.
set -uo pipefail
keep=$(realpath "${1:?directory of the unpacked stack}"); out=${2:?directory for the results}
prompts=$(realpath "${3:?prompts}"); size=${4:?small or inflated}; shift 4
cd "$(dirname "$0")/../.."
mkdir -p "$out"; out=$(realpath "$out")
source benchmarks/gpu/env.sh "$keep"
export OMP_NUM_THREADS=2
pair=(--drafter adaspec/bundled/smollm2-135m-instruct-b16)
servers=(plain ngram dflash adaspec adaspec-goodput)
tokens=200000
if [ "$size" = inflated ]; then
  [ -d "$keep/inflated" ] || python3 -m benchmarks.inflate "$keep/inflated" --device cuda || exit 1
  pair=(--target "$keep/inflated/target" --drafter "$keep/inflated/drafter")
  servers=(plain dflash adaspec adaspec-goodput)  # 18 GB of weights each, and 131 kB a token
  tokens=60000
fi
python3 -m benchmarks.gpu.serving "${pair[@]}" --prompts "$prompts" --out "$out/$size.json" \
  --logs "$out/$size-logs" --servers "${servers[@]}" --max-total-tokens "$tokens" \
  --concurrency 1 8 32 64 128 --graph-sizes 1 2 4 8 16 32 64 96 128 --max-tokens 256 --repeats 3 \
  --server-args "--attention-backend triton --stream-interval 8 --sleep-on-idle \
    --cuda-graph-backend-prefill disabled" "$@" 2>&1 | tee "$out/$size.log" | tail -40

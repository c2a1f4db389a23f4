#!/usr/bin/env bash
# Run every GPU test on an unpacked stack (benchmarks/gpu/keep.sh), within nine minutes:
#   tests/gpu/run.sh KEEP_DIR OUT_DIR [PYTEST_OPTIONS]
# OUT_DIR receives pytest.log, junit.xml, and the end of each server's and learner's log.
set -uo pipefail
keep=$(realpath "${1:?directory of the unpacked stack}"); out=${2:?directory for the results}; shift 2
cd "$(dirname "$0")/../.."
mkdir -p "$out"; out=$(realpath "$out")
source benchmarks/gpu/env.sh "$keep"
work=$(mktemp -d)
# An interrupt lets pytest stop its servers and write its report.
timeout --signal=INT --kill-after=25 "${GPU_TEST_SECONDS:-510}" \
  python3 -m pytest tests/gpu tests/online -m gpu -v -p no:cacheprovider --timeout=480 \
  --durations=0 --basetemp="$work/pytest" --junitxml="$out/junit.xml" "$@" 2>&1 | tee "$out/pytest.log"
status=$?
find "$work" -name '*.log' -print0 | while IFS= read -r -d '' log; do
  tail -n 200 "$log" > "$work/$(basename "$log").txt"
done
tar -C "$work" -czf "$out/logs.tar.gz" $(cd "$work" && ls -- *.log.txt 2>/dev/null)
nvidia-smi --query-gpu=name,memory.used,memory.total --format=csv > "$out/gpu.txt" 2>&1
exit "$status"

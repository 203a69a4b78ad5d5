#!/bin/bash
# Runs a sweep on a machine with one GPU and no package registries; see docs/profiling.md.
#
#   bash estimator/profiling/gpu_sweep.sh SWEEP.jsonl PROCESSES [options of the profiler ...]
#
# From the repository's root, after PYTHONPATH names where megatron-core and Transformer Engine lie. Results that
# estimator/data/measured/ holds for this sweep are not run again. What comes back goes to $OUT (default: .):
# NAME.jsonl with every record, old and new, NAME.log, and with TRACE=1 the allocator histories in pieces of 15 MB.
# Seconds of a limited lease: STOP_AFTER (default 480); nothing new is started after it.
set -u
SWEEP=$1; PROCESSES=$2; shift 2
OUT=${OUT:-.}; NAME=$(basename "$SWEEP" .jsonl); FOLDER=$(mktemp -d)
export PYTHONUNBUFFERED=1 NVTE_FRAMEWORK=pytorch PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton}
# Byte code once, not in every process (packages unpacked with --no-compile have none).
python3 - <<'PY'
import compileall, os
for entry in os.environ["PYTHONPATH"].split(":"):
    if entry and entry != os.getcwd() and os.path.isdir(entry):
        compileall.compile_dir(entry, quiet=2, workers=0)
PY
[ -f "estimator/data/measured/$NAME.jsonl" ] && cp "estimator/data/measured/$NAME.jsonl" "$OUT/$NAME.jsonl"
TRACING=(); [ "${TRACE:-0}" = 1 ] && TRACING=(--trace "$FOLDER")
python3 -m estimator.profiling --sweep "$SWEEP" --output "$OUT/$NAME.jsonl" --jobs "$PROCESSES" \
  --stop-after "${STOP_AFTER:-480}" "${TRACING[@]}" "$@" 2>&1 | tee "$OUT/$NAME.log"
STATUS=${PIPESTATUS[0]}
if [ "${TRACE:-0}" = 1 ]; then (cd "$FOLDER" && tar cf - . | split -b 15M - "$OUT/$NAME.traces.tar."); fi
nvidia-smi --query-gpu=name,memory.used,memory.total --format=csv || true
exit "$STATUS"

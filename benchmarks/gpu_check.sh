#!/usr/bin/env bash
# All of swarmnet that waits for a GPU, in about an hour on a machine with two: tests, figures, a swarm with kills.
#
#     python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && benchmarks/gpu_check.sh [DIR]
#
# DIR (gpu-check) gets a log and a JSON file of each part, and summary.txt: a line a part, its exit code and seconds.
# A part that fails stops none of the others. Ends with 1 if one did. With REHEARSE=1 the figures are the quick ones of
# the CPU: that the script runs, not how fast a GPU is.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-gpu-check}")
python=${PYTHON:-.venv/bin/python}
rehearse=${REHEARSE:-}
mkdir -p "$out"
: > "$out/summary.txt"
failed=0

part() { # NAME COMMAND...: at most 20 minutes
    local name=$1 began=$SECONDS code
    shift
    echo "== $name: $*"
    timeout 1200 "$@" > "$out/$name.log" 2>&1
    code=$?
    printf '%-14s exit %-3s %4d s\n' "$name" "$code" $((SECONDS - began)) | tee -a "$out/summary.txt"
    if [ "$code" -ne 0 ]; then
        failed=1
        tail -n 20 "$out/$name.log"
    fi
}

if [ -z "$rehearse" ]; then
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
        echo "gpu_check: torch sees no CUDA device here: install a CUDA build of torch, or set REHEARSE=1" >&2
        exit 2
    }
    nvidia-smi > "$out/machine.txt" 2>&1
    device=(--device cuda)
    quick=()
    few=()
    steps=60
else
    device=(--device cpu)
    quick=(--quick)
    few=(--parameters 262144 --turns 1)
    steps=8
fi

# ------------------------------------------------------------ tests

part tests "$python" -m pytest -m gpu -rs -p no:cacheprovider tests

# ------------------------------------------------------------ figures

part mfu "$python" benchmarks/mfu.py "${device[@]}" "${quick[@]}" --json "$out/mfu.json"
part mesh "$python" benchmarks/mesh.py "${quick[@]}" --json "$out/mesh.json"
part apply "$python" benchmarks/apply.py "${device[@]}" "${few[@]}" --json "$out/apply.json"
part codecs "$python" benchmarks/codecs.py "${device[@]}" ${rehearse:+--elements 65536 --repeat 1} --json "$out/codecs.json"
part activations "$python" benchmarks/activations.py "${device[@]}" --steps 0 \
    ${rehearse:+--layers 1 --width 64 --tokens 64 --turns 1} --json "$out/activations.json"

# ------------------------------------------------------------ a swarm, replicas killed

part swarm "$python" -m swarmnet local "${device[@]}" --stages 2 --replicas 2 --steps "$steps" \
    --kill 1@3 --verify --out "$out/swarm"

cat "$out/summary.txt"
exit $failed

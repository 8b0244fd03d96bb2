#!/usr/bin/env bash
# Runs N processes of one command on this machine, as one run:
#
#     bash launch/local.sh 4 python -m noloco_jax.train --config=configs/quickstart.py --workdir=runs/four
#
# Every line of output begins with the number of its process. If one fails, all end with its exit status. Exit status 75 of
# all (stopped by SIGTERM and saved) starts them again. RESTARTS=N also starts them again, up to N times, if one is killed
# or fails with status 1: use it for the processes of an island. Ctrl-C, or SIGTERM to this script, lets them save and
# stop; a second Ctrl-C kills them. If there are GPUs, each of several processes takes one; with fewer GPUs than
# processes, set JAX_PLATFORMS=cpu. PORT=12345 sets the port of process 0.
#
# For N processes on each of M machines, start this script on every machine with NODES=M, NODE=I (its number from 0; in a
# Kubernetes Indexed Job the pod's index) and JAX_COORDINATOR_ADDRESS=HOST:PORT, a free port of machine 0.
set -uo pipefail

if ! [[ "${1:-}" =~ ^[1-9][0-9]*$ ]] || [ $# -lt 2 ]; then
    echo "error: usage: bash launch/local.sh N COMMAND [ARGUMENT...], with N processes" >&2
    exit 2
fi
n=$1
shift
nodes=${NODES:-1} node=0
if ((nodes > 1)); then
    node=${NODE:-${JOB_COMPLETION_INDEX:-}}
    if ! [[ "$node" =~ ^[0-9]+$ ]] || ((node >= nodes)) || [ -z "${JAX_COORDINATOR_ADDRESS:-}" ]; then
        echo "error: NODES=$nodes with NODE=$node and JAX_COORDINATOR_ADDRESS=${JAX_COORDINATOR_ADDRESS:-}:" \
            "give every machine a NODE from 0 to $((nodes - 1)), and HOST:PORT of machine 0" >&2
        exit 2
    fi
else
    JAX_COORDINATOR_ADDRESS="127.0.0.1:${PORT:-$((61440 + $$ % 4096))}"
fi
export JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES=$((n * nodes))
if command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') # MIG devices and warnings have lines too
else
    gpus=$(compgen -G "/dev/nvidia[0-9]*" | grep -c .) # a container may have the devices without the tool
fi
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    visible=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]') # -1 is none
    if ((visible < gpus)); then gpus=$visible; fi
fi
if ((0 < gpus && gpus < n)) && [[ "${JAX_PLATFORMS:-}" != cpu* ]]; then
    echo "error: $n processes want a GPU each and there are $gpus: start $gpus or fewer, or set JAX_PLATFORMS=cpu" >&2
    exit 2
fi

stopping="" pids=() restarts=${RESTARTS:-0}
if ! [[ "$restarts" =~ ^[0-9]+$ ]]; then
    echo "error: RESTARTS=$restarts is no number: give the number of restarts after a failure" >&2
    exit 2
fi

start_all() {
    local i id
    pids=()
    for ((i = 0; i < n; i++)); do
        if ((n > 1 && gpus >= n)); then export JAX_LOCAL_DEVICE_IDS=$i; fi
        id=$((node * n + i))
        JAX_PROCESS_ID=$id "$@" > >(sed -u "s/^/[$id] /") 2>&1 </dev/null &
        pids+=($!)
    done
}

signal_all() { if ((${#pids[@]})); then kill "-$1" "${pids[@]}" 2>/dev/null; fi; }

on_interrupt() {
    local before=$stopping
    stopping=130 # first, as bash may run this again for the next interrupt before it ends
    if [ -n "$before" ]; then signal_all KILL; else signal_all TERM; fi
}

on_terminate() {
    stopping=${stopping:-75}
    signal_all TERM
}

trap on_interrupt INT
trap on_terminate TERM

# Waits for all; leaves the first exit status other than 0 in $status.
wait_for_all() {
    local i code
    status=0
    while ((${#pids[@]})); do
        for i in "${!pids[@]}"; do
            if kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
            wait "${pids[i]}" 2>/dev/null
            code=$?
            unset "pids[i]"
            if ((code == 0 || status != 0)); then continue; fi
            status=$code
            if ((code != 75)) && [ -z "$stopping" ]; then
                echo "[launcher] process $((node * n + i)) exited with $code: ending the others" >&2
                signal_all KILL
            fi
        done
        sleep 0.1
    done
}

while true; do
    start_all "$@"
    wait_for_all
    if [ -n "$stopping" ]; then break; fi
    if ((status == 75)); then
        echo "[launcher] stopped with everything saved: starting all $n again" >&2
    elif ((restarts > 0 && (status == 1 || status > 128))); then
        restarts=$((restarts - 1))
        echo "[launcher] starting all $n again, at most $restarts times more" >&2
        sleep 1
        if [ -n "$stopping" ]; then break; fi
    else
        break
    fi
done
if [ "$stopping" = 130 ]; then exit 130; fi
exit "$status"

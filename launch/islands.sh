#!/usr/bin/env bash
# Trains N islands on this machine, which meet over TLS as they would between machines, and shows what became of them:
#
#     bash launch/islands.sh 4 --config=configs/quickstart.py --workdir=runs/islands
#
# Further arguments go to `python -m noloco_jax.island train`. DIR gets a roster, keys and a folder for each island,
# with its log in it; the first one's log is shown. Cores are shared out, and GPUs where there are any. An island that
# is killed or fails is started again, ten times at most: try `kill -9` with a number that is printed. One that exits
# with 2, a mistake to correct, is not: it is reported, the others go on (and wait for it at their end, `--linger`
# seconds at most), and at the end its status is this script's. Ctrl-C, or a SIGTERM to this script, lets all save and
# say goodbye, and the same command goes on; a second Ctrl-C ends all at once. At the end comes the merged model in
# DIR/merged, with its perplexity. PYTHON chooses the interpreter. To watch them:
#
#     python -m noloco_jax.island dashboard --roster=DIR/roster.toml --keys=DIR/keys
set -uo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

[[ "${1:-}" =~ ^[1-9][0-9]*$ ]] && (($1 >= 2)) ||
    fail "usage: bash launch/islands.sh N --config=FILE --workdir=DIR [ARGUMENT...], with N islands, 2 or more"
n=$1
shift
workdir="" arguments=()
while (($#)); do
    case $1 in
    --workdir=*) workdir=${1#--workdir=} ;;
    --workdir) workdir=${2:-} && shift ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
workdir=${workdir/#\~\//$HOME/}
[ -n "$workdir" ] || fail "--workdir=DIR is missing: give a folder for all the islands"
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python
    if ! [ -x "$python" ]; then python=python3; fi
fi
"$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('noloco_jax') is None)" 2>/dev/null ||
    fail "noloco_jax is not installed for $python: give an interpreter that has it as PYTHON=/path/to/python"
mkdir -p "$workdir" || fail "$workdir cannot be made: give another --workdir"
if command -v flock >/dev/null; then
    exec 9>"$workdir/lock"
    flock -n 9 || fail "islands of $workdir are running: stop them, or give another --workdir"
fi

# The roster, with ports that are free just now; prints the cores of each island, a line each.
cores=$("$python" - "$n" "$workdir/roster.toml" <<'END'
import contextlib, pathlib, re, socket, sys

from noloco_jax.cores import usable_cores

n, path = int(sys.argv[1]), pathlib.Path(sys.argv[2])
before = len(re.findall(r"^\[\[island\]\]", path.read_text(), re.MULTILINE)) if path.exists() else n
if before != n:
    sys.exit(f"error: {path} is of {before} islands: give their number, or another --workdir")
with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
    ports = [one.getsockname()[1] for one in sockets]
islands = [f'\n[[island]]\nname = "island{i}"\naddress = "127.0.0.1:{port}"\n' for i, port in enumerate(ports)]
path.write_text('run = "islands"\n' + "".join(islands))
cores = usable_cores()
for i in range(n):
    print(",".join(map(str, cores[i::n] or [cores[i % len(cores)]])))
END
) || exit 2
IFS=$'\n' read -r -d '' -a cores <<<"$cores" || true  # not mapfile, which the bash of macOS lacks
"$python" -m noloco_jax.island keys --roster="$workdir/roster.toml" --out="$workdir/keys" >"$workdir/keys.log" 2>&1 ||
    fail "$(tail -n 1 "$workdir/keys.log")"

gpus=0
if [[ "${JAX_PLATFORMS:-}" != cpu* ]] && command -v nvidia-smi >/dev/null; then
    IFS=$', \n' read -r -d '' -a gpu < <(if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then echo "$CUDA_VISIBLE_DEVICES"; else
        nvidia-smi --query-gpu=index --format=csv,noheader; fi 2>/dev/null) || true
    gpus=${#gpu[@]}
fi
stopping="" failed="" pids=() starts=() folders=() finished=()
for ((i = 0; i < n; i++)); do folders+=("$workdir/island$i"); done

start() {
    local i=$1 command=()
    mkdir -p "${folders[i]}"
    if command -v taskset >/dev/null; then command=(taskset -c "${cores[i]}"); fi
    command+=("$python" -m noloco_jax.island train "${arguments[@]}" --config.num_replicas="$n"
        --roster="$workdir/roster.toml" --name="island$i" --keys="$workdir/keys/island$i" --workdir="${folders[i]}")
    (
        if ((gpus > 0)); then
            export CUDA_VISIBLE_DEVICES=${gpu[i % gpus]}
            # Several on one GPU, and JAX refuses its two names of a fraction at once.
            if ((n > gpus)) && [ -z "${XLA_CLIENT_MEM_FRACTION:-}${XLA_PYTHON_CLIENT_MEM_FRACTION:-}" ]; then
                XLA_CLIENT_MEM_FRACTION=$(printf '0.%02d' $((90 / ((n + gpus - 1) / gpus))))
                export XLA_CLIENT_MEM_FRACTION
            fi
        fi
        exec "${command[@]}"
    ) >>"${folders[i]}/log" 2>&1 </dev/null &
    pids[i]=$!
    starts[i]=$((${starts[i]:-0} + 1))
    echo "[launcher] island$i is process ${pids[i]}, its log ${folders[i]}/log"
}

signal_all() { if ((${#pids[@]})); then kill "-$1" "${pids[@]}" 2>/dev/null; fi; }

on_interrupt() {
    if [ -n "$stopping" ]; then signal_all KILL; else signal_all TERM; fi
    stopping=130
}

on_terminate() {
    stopping=${stopping:-75}
    signal_all TERM
}

# An island's process has ended with a status: most often the run is over for it.
ended() {
    local i=$1 code=$2
    if ((code == 0)); then finished[i]=1; fi
    if ((code == 0)) || [ -n "$stopping" ]; then return; fi
    if ((code != 75 && code != 1 && code < 128)) || ((starts[i] > 10)); then
        echo "[launcher] island$i exited with $code and is given up, the others go on; its log ends with" >&2
        tail -n 3 "${folders[i]}/log" >&2
        failed=$code
        return
    fi
    echo "[launcher] island$i was ended (exit status $code): it starts again" >&2
    start "$i"
}

trap on_interrupt INT
trap on_terminate TERM
for ((i = 0; i < n; i++)); do start "$i"; done
(trap '' INT && exec tail -n 0 -F "${folders[0]}/log" 2>/dev/null 9>&-) &
shown=$!
while ((${#pids[@]})); do
    for i in "${!pids[@]}"; do
        if kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
        wait "${pids[i]}" 2>/dev/null
        code=$?
        unset "pids[i]"
        ended "$i" "$code"
    done
    sleep 0.2
done
sleep 0.5 # the last lines are shown
kill "$shown" 2>/dev/null
wait "$shown" 2>/dev/null

if [ -n "$stopping" ]; then
    if ((stopping == 130 || stopping == 75)); then
        echo "[launcher] all islands have stopped: the same command resumes"
    fi
    exit "$stopping"
fi
complete=()
for i in "${!finished[@]}"; do complete+=("${folders[i]}"); done
if ((${#complete[@]} == 0)); then exit "$failed"; fi
if [ -e "$workdir/merged" ]; then
    rm -rf "$workdir/merged.old"
    mv "$workdir/merged" "$workdir/merged.old"
fi
"$python" -m noloco_jax.island merge --out="$workdir/merged" --evaluate --workdirs "${complete[@]}" || exit
if [ -n "$failed" ]; then
    echo "[launcher] ${#complete[@]} of $n islands have come to the end" >&2
    exit "$failed"
fi

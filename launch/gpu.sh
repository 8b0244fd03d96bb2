#!/usr/bin/env bash
# The first thing to run on a GPU: correctness and throughput, in 15 minutes on an H200.
#
#     pip install -e '.[cuda12,test]'
#     bash launch/gpu.sh OUT              # everything, in this order
#     bash launch/gpu.sh OUT tests eight  # some parts
#
# tests        numbers against golden files, numpy and the CPU; bitwise resume
# quickstart   the small Llama of README
# eight        125M, 8 virtual replicas, with and without outer.offload
# one, four    the same global batch as 1 and as 4 replicas
# best         125M, 8 virtual replicas, the setting :best of configs/README.md
# mask, moe    125M, one replica and an eighth of the batch, with a document mask, and with 8 experts
# large        1.3B, one replica
# small        the quickstart's four replicas
# dtypes       the quickstart in float32 and bfloat16, its perplexity
#
# OUT/PART.log has the output, OUT/PART.json the figures of a benchmark, OUT/PART the folder of a run or a trace. If a part
# fails, the others run, and the exit status is 1. PYTHON is the interpreter, BENCH has further flags of benchmarks:
# BENCH="--config.data.batch_size=8" for a smaller GPU.
set -uo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

all="tests quickstart eight one four best mask moe large small dtypes"
python=${PYTHON:-python}
if [ $# -lt 1 ]; then fail "usage: bash launch/gpu.sh OUT [PART...], with parts of $all"; fi
out=$(realpath -m "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# shellcheck disable=SC2086
if [ $# -eq 0 ]; then set -- $all; fi
for name in "$@"; do
    case " $all " in *" $name "*) ;; *) fail "unknown part $name: choose from $all" ;; esac
done
if ! "$python" -c "import jax, pytest, noloco_jax.config" 2>/dev/null; then
    fail "$python cannot run noloco_jax and its tests: pip install -e '.[cuda12,test]', or set PYTHON"
fi
mkdir -p "$out" || exit

bench() {
    local name=$1
    shift
    rm -f "$out/$name.json"
    # shellcheck disable=SC2086
    "$python" -m noloco_jax.bench "$@" --data_seconds=0 --json="$out/$name.json" --profile="$out/$name" ${BENCH:-}
}

part() {
    case $1 in
        tests) "$python" -m pytest -m gpu -q -n auto --maxprocesses=8 --durations=10 ;;
        quickstart) "$python" -m noloco_jax.train --config=configs/quickstart.py --workdir="$out/quickstart" ;;
        eight)
            bench eight --config=configs/c4_125m.py --config.mesh.replica=1 --config.num_microbatches=8 \
                --vary outer.offload=False,True
            ;;
        one) bench one --config=configs/c4_125m.py:local,replicas=1 --config.num_microbatches=64 ;;
        four)
            bench four --config=configs/c4_125m.py:noloco,replicas=4 --config.mesh.replica=1 \
                --config.num_microbatches=16
            ;;
        best) bench best --config=configs/c4_125m.py:best --config.mesh.replica=1 --config.num_microbatches=8 ;;
        mask)
            bench mask --config=configs/c4_125m.py:local,replicas=1 --config.data.batch_size=64 \
                --config.num_microbatches=8 --vary data.document_mask=False,True
            ;;
        moe)
            bench moe --config=configs/c4_125m.py:local,replicas=1 --config.data.batch_size=64 \
                --config.num_microbatches=8 --config.model.kind=moe
            ;;
        large) bench large --config=configs/c4_1b.py:local,replicas=1 --config.data.batch_size=8 ;;
        small) bench small --config=configs/quickstart.py --config.mesh.replica=1 --vary model.dtype=float32,bfloat16 ;;
        dtypes)
            JAX_DEFAULT_MATMUL_PRECISION=highest "$python" -m noloco_jax.compare --config=configs/quickstart.py \
                --methods=noloco --vary model.dtype=float32,bfloat16 --workdir="$out/dtypes"
            ;;
    esac
}

status=0
for name in "$@"; do
    echo "== $name, $(date +%H:%M:%S)"
    part "$name" 2>&1 | tee "$out/$name.log" || {
        echo "== $name failed, see $out/$name.log"
        status=1
    }
done
exit $status

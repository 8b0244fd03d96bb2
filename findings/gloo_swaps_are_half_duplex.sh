#!/usr/bin/env bash
# A swap of two CPU processes by `jax.lax.ppermute` takes twice the time of the link, although its two directions are
# independent: over gloo each direction waits for the other. `psum` over the same pair sends as many bytes each way, and
# takes the link's time. Seen when one process is 50 ms later than the other, as training processes are.
# Needs root, iproute2 and unshare: two network namespaces are joined by a link of 20 Mbit/s in each direction.
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "run this as root" >&2 && exit 1; }
folder=$(mktemp -d)
holders=()
trap 'kill "${holders[@]}" 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

cat >"$folder/swap.py" <<'PYTHON'
import sys
import time

import jax

index = int(sys.argv[1])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("10.0.0.1:7000", 2, index)
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

SIZE, RATE = 600_000, 20e6 / 8
mesh = jax.make_mesh((2,), ("r",), (AxisType.Auto,))
x = jax.make_array_from_callback(
    (2, SIZE), NamedSharding(mesh, P("r")), lambda place: np.full((1, SIZE), place[0].start or 0, np.float32)
)


def seconds(form):
    program = jax.jit(jax.shard_map(form, mesh=mesh, in_specs=P("r"), out_specs=P("r"), check_vma=False))
    program(x).block_until_ready()
    taken = []
    for _ in range(3):
        time.sleep(0.5)
        start = (int(time.time()) + 2) + 0.05 * index
        time.sleep(start - time.time())
        program(x).block_until_ready()
        taken.append(time.time() - start)
    return sorted(taken)[1]


link = 4 * SIZE / RATE
swap, total = (seconds(form) for form in (lambda x: lax.ppermute(x, "r", [(0, 1), (1, 0)]), lambda x: lax.psum(x, "r")))
if index == 0:
    print(f"jax {jax.__version__}: the link needs {link:.2f} s each way, ppermute takes {swap:.2f} s, psum {total:.2f} s")
    sys.exit(not (swap > 1.5 * link and total < 1.4 * link))
PYTHON

hold() { # makes a namespace with a host name, whose processes find both names; prints its process
    unshare --net --uts --mount sh -ec "hostname end$1; mount --bind $folder/hosts /etc/hosts
        ip link set lo up; touch $folder/ready$1; exec sleep 600" >/dev/null 2>&1 &
    until [ -e "$folder/ready$1" ]; do kill -0 $! && sleep 0.1; done
    echo $!
}
printf '127.0.0.1 localhost\n10.0.0.1 end0\n10.0.0.2 end1\n' >"$folder/hosts"
holders=("$(hold 0)")
holders+=("$(hold 1)")
inside() { nsenter --target="${holders[$1]}" --net --uts --mount "${@:2}"; }
inside 0 ip link add link0 type veth peer name link1 netns "${holders[1]}"
for i in 0 1; do
    inside $i ip addr add "10.0.0.$((i + 1))/24" dev link$i
    inside $i ip link set link$i up
    inside $i tc qdisc add dev link$i root tbf rate 20mbit burst 64kb latency 200ms
done
export JAX_PLATFORMS=cpu
inside 1 "$folder/venv/bin/python" "$folder/swap.py" 1 >/dev/null 2>&1 &
inside 0 "$folder/venv/bin/python" "$folder/swap.py" 0 2>/dev/null
wait $!

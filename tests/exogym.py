"""Speed beside EXO Gym: both train the same Llama on bytes with DiLoCo and four replicas, in float32 on this CPU.

    python -m tests.exogym --gym=DIR --text=FILE                          # 0.6M parameters
    python -m tests.exogym --gym=DIR --text=FILE --hidden=256 --layers=3  # 3.3M

It needs PyTorch, psutil and in DIR a checkout of https://github.com/exo-explore/gym (PyPI's exogym is empty). It prints
tokens per second in the second half of the run, seconds to the tenth step, and memory: the largest sum of what the
processes hold, shared pages divided by their users. EXO Gym has a process for each replica, with the threads that
OMP_NUM_THREADS allows.
"""
# pyright: reportMissingImports=false

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

try:
    import psutil
    import torch
    import torch.nn.functional as F
    from torch import nn
except ModuleNotFoundError as error:
    print(f"error: this needs {error.name}, which is not installed: pip install torch psutil", file=sys.stderr)
    sys.exit(2)

REPLICAS, BATCH, LENGTH, VOCAB, SYNC_EVERY, FIRST = 4, 8, 128, 259, 10, 10


class Block(nn.Module):
    """Attention with rotary positions, and SwiGLU."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 8 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (
            y * cos + torch.cat([-y[..., y.shape[-1] // 2 :], y[..., : y.shape[-1] // 2]], -1) * sin for y in (q, k)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """The Llama of `configs/c4_bytes.py`; it returns the loss of a batch (B, T + 1) of tokens."""

    def __init__(self, hidden: int, layers: int, heads: int):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, hidden), nn.RMSNorm(hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        size = hidden // heads
        angles = torch.outer(torch.arange(LENGTH), 10000 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Watch:
    """Largest memory of this process's children while it is open, and seconds until a file has so many lines."""

    def __init__(self, path: Path, lines: int):
        self._path, self._lines = path, lines
        self.peak, self.seconds = 0, 0.0

    def __enter__(self) -> "Watch":
        self._open, self._start = True, time.monotonic()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open = False
        self._thread.join()

    def _look(self) -> None:
        while self._open:
            total = 0
            for child in psutil.Process().children(recursive=True):
                try:
                    total += child.memory_full_info().pss
                except psutil.Error:  # it has just ended
                    continue
            self.peak = max(self.peak, total)
            if not self.seconds and self._path.exists() and len(self._path.read_text().splitlines()) >= self._lines:
                self.seconds = time.monotonic() - self._start
            time.sleep(0.1)


def theirs(hidden: int, layers: int, steps: int, text: Path) -> tuple[float, float, int]:
    """Return tokens a second, seconds to the tenth step, and the largest memory of EXO Gym's processes."""
    from exogym.trainer import Trainer

    data = torch.tensor(list(text.read_bytes()))[: LENGTH * 20_000]
    rows = data[: len(data) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    with tempfile.TemporaryDirectory() as folder, Watch(Path(folder) / "times", FIRST) as watch:
        trainer = Trainer(Llama(hidden, layers, 4), list(rows), list(rows), device="cpu")
        options = {"batch_size": BATCH, "minibatch_size": BATCH, "val_size": 0, "disable_logging": True}
        strategy = _timed_diloco(Path(folder) / "times")
        trainer.fit(num_epochs=1, strategy=strategy, num_nodes=REPLICAS, max_steps=steps, **options)
        times = [float(line) for line in (Path(folder) / "times").read_text().split()]
    rate = (steps - 1 - steps // 2) * REPLICAS * BATCH * LENGTH / (times[steps - 1] - times[steps // 2])
    return rate, watch.seconds, watch.peak


def _timed_diloco(path: Path) -> Any:
    from exogym.strategy.diloco import DiLoCoStrategy
    from exogym.strategy.optim import OptimSpec

    strategy = DiLoCoStrategy(OptimSpec(torch.optim.AdamW, lr=2e-3), H=SYNC_EVERY)
    strategy.communication_modules.append(_Clock(path))
    return strategy


class _Clock:
    """Writes the time of every step of rank 0, as a communication module of EXO Gym."""

    def __init__(self, path: Path):
        self._path = path

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        pass

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        if rank == 0:
            with self._path.open("a") as file:
                file.write(f"{time.time()}\n")


def _use_loopback() -> None:
    """Let EXO Gym's processes connect over Linux's loopback interface `lo`; it names `lo0`."""
    import exogym.trainer

    def connect(backend: str, rank: int, world_size: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group(backend, rank=rank, world_size=world_size)

    exogym.trainer.init_process_group_portsafe = connect


def ours(hidden: int, layers: int, steps: int, text: Path) -> tuple[float, float, int]:
    """Return the same of a run of this project."""
    values = {"method": "diloco", "outer.sync_every": SYNC_EVERY, "num_replicas": REPLICAS, "num_steps": steps}
    values |= {"model.hidden_size": hidden, "model.intermediate_size": 4 * hidden, "model.num_layers": layers}
    values |= {"model.vocab_size": VOCAB, "model.num_heads": 4, "model.num_kv_heads": 4, "log_every": FIRST}
    values |= {"data.kind": "text", "data.path": text, "data.sequence_length": LENGTH, "data.batch_size": BATCH}
    values |= {
        "eval_every": steps,
        "checkpoint_every": steps,
        "eval_batches": 1,
        "inner.lr": 2e-3,
        "inner.warmup_steps": FIRST,
    }
    with tempfile.TemporaryDirectory() as folder, Watch(Path(folder) / "run" / "metrics.jsonl", 1) as watch:
        flags = [f"--config.{name}={value}" for name, value in values.items()]
        command = [sys.executable, "-m", "noloco_jax.train", "--config=configs/c4_bytes.py", f"--workdir={folder}/run"]
        cold = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # no earlier run's programs
        subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL, env=cold)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    middle, last = trained[len(trained) // 2], trained[-1]
    rate = (last["tokens"] - middle["tokens"]) / (last["seconds"] - middle["seconds"])
    return rate, watch.seconds, watch.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gym", required=True, help="a checkout of EXO Gym")
    parser.add_argument("--text", type=Path, required=True, help="a text file of a megabyte or more")
    for name, default in (("hidden", 128), ("layers", 2), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if not (Path(args.gym) / "exogym").is_dir():
        parser.error(f"--gym={args.gym} holds no package exogym: give a checkout of EXO Gym")
    if not args.text.is_file():
        parser.error(f"--text={args.text}: there is no such file")
    sys.path.insert(0, args.gym)
    os.environ["PYTHONPATH"] = os.pathsep.join([args.gym, os.environ.get("PYTHONPATH", "")])
    size = sum(p.numel() for p in Llama(args.hidden, args.layers, 4).parameters())
    print(f"{size:,} parameters, {REPLICAS} replicas of {BATCH} x {LENGTH} tokens, {args.steps} steps")
    for name, measure in (("EXO Gym", theirs), ("noloco_jax", ours)):
        rate, first, memory = measure(args.hidden, args.layers, args.steps, args.text)
        print(f"{name}: {rate:,.0f} tokens/s, {first:.1f} s to step {FIRST}, {memory / 2**20:,.0f} MiB")


if __name__ == "__mp_main__":  # in a process of EXO Gym
    _use_loopback()
if __name__ == "__main__":
    main()

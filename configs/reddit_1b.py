"""2.14B parameters on Reddit comments: the paper's 1.3B Llama (2048 wide, 24 layers) with Llama 3's tokenizer.

8 replicas, 1M tokens a step, 25,000 steps.

The data is two folders of parquet files with Llama 3 tokens: `input_ids` beside either `label` or `attention_mask`.

    python -m noloco_jax.train --config=configs/reddit_1b.py --workdir=runs/reddit_1b \\
        --config.data.path=reddit/train --config.data.validation_path=reddit/dev

`--config=configs/reddit_1b.py:diloco` runs another method (noloco, diloco, ddp, local; best: configs/README.md);
`:noloco,replicas=16,stages=2` shares the same global batch out among other replicas. The paper's FSDP is `:ddp`, or,
with one copy sharded over 8 devices, `:ddp,replicas=1 --config.mesh.fsdp=8`.

On GPUs of 80 GB, one a replica, add `--config.outer.offload=True` (56 GiB in an inner step, by XLA's account of the
compiled program; another 16 GiB without, which may just fit), or share out a replica with `--config.mesh.fsdp`.

This file quotes no figure of the paper's for Reddit. On C4 it measured perplexities of 18.8 (FSDP), 21.8 (DiLoCo) and
21.1 (NoLoCo) at this size, with 8 replicas of 2 pipeline stages (Table 2).
"""

import runpy
from pathlib import Path


def get_config(argument="noloco"):
    paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))
    return paper["paper_config"](argument, size="1b", data="reddit")

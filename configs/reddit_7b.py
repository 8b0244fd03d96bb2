"""9.64B parameters on Reddit comments: the paper's 6.8B Llama (4096 wide, 32 layers) with Llama 3's tokenizer.

16 replicas, 2M tokens a step, 25,000 steps.

The data is two folders of parquet files with Llama 3 tokens: `input_ids` beside either `label` or `attention_mask`.

    python -m noloco_jax.train --config=configs/reddit_7b.py --workdir=runs/reddit_7b \\
        --config.data.path=reddit/train --config.data.validation_path=reddit/dev

`--config=configs/reddit_7b.py:diloco` runs another method (noloco, diloco, ddp, local; best: configs/README.md);
`:noloco,replicas=32,stages=4` shares the same global batch out among other replicas. The paper's FSDP is `:ddp`, or,
with one copy sharded over 8 devices, `:ddp,replicas=1 --config.mesh.fsdp=8`.

This file quotes no figure of the paper's for Reddit. On C4 it measured perplexities of 15.7 (FSDP), 17.3 (DiLoCo) and
16.6 (NoLoCo) at this size, with 16 replicas of 4 pipeline stages (Table 2).
"""

import runpy
from pathlib import Path


def get_config(argument="noloco"):
    paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))
    return paper["paper_config"](argument, size="7b", data="reddit")

"""310M parameters on Reddit comments: the paper's 125M Llama (768 wide, 12 layers) with Llama 3's tokenizer.

8 replicas, 0.5M tokens a step, 25,000 steps.

The data is two folders of parquet files with Llama 3 tokens: `input_ids` beside either `label` or `attention_mask`.

    python -m noloco_jax.train --config=configs/reddit_125m.py --workdir=runs/reddit_125m \\
        --config.data.path=reddit/train --config.data.validation_path=reddit/dev

`--config=configs/reddit_125m.py:diloco` runs another method (noloco, diloco, ddp, local; best: configs/README.md);
`:noloco,replicas=4,stages=2` shares the same global batch out among other replicas. The paper's FSDP is
`:ddp`, or, with one copy sharded over 8 devices, `:ddp,replicas=1 --config.mesh.fsdp=8`.

This file quotes no figure of the paper's for Reddit. On C4 it measured perplexities of 29.1 (FSDP), 32.1 (DiLoCo) and
31.3 (NoLoCo) at this size, with 4 replicas of 2 pipeline stages (Table 2).
"""

import runpy
from pathlib import Path


def get_config(argument="noloco"):
    paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))
    return paper["paper_config"](argument, size="125m", data="reddit")

"""Training figures of an island, as TensorBoard, W&B and watchers get them."""

import sys
from pathlib import Path
from types import SimpleNamespace

from noloco_jax.island.membership import Membership
from noloco_jax.island.mode import IslandMode
from noloco_jax.islands.recent import Recent
from noloco_jax.islands.roster import Address, Island, Roster
from noloco_jax.train.training import _open_metrics
from support.events import events
from support.fake_wandb import FakeWandb
from support.training_islands import small


def test_an_islands_figures_reach_tensorboard_wandb_and_watchers(tmp_path: Path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    roster = Roster("c4", (Island("paris", Address("127.0.0.1", 1)), Island("rome", Address("127.0.0.1", 2))))
    mode = IslandMode(Membership(roster, "paris", None))
    recent = Recent()
    mode._agent = SimpleNamespace(recent=recent)  # pyright: ignore[reportAttributeAccessIssue]
    with _open_metrics(small(), tmp_path, None, False, "project", mode) as metrics:
        metrics.write(10, "train", loss=2.5, grad_norm=1.0, tokens_per_second=100.0)
        metrics.write(12, "exchange", partner="rome", participation=0.5, goodput=0.75)
        metrics.write(12, "eval", island="paris", perplexity=9.0)

    [run] = wandb.runs
    assert (run["project"], run["name"], run["group"]) == ("project", "paris", "c4")
    assert run["config"]["island"] == "paris" and run["config"]["num_steps"] == 20
    scalars = {"train/loss": 2.5, "train/grad_norm": 1.0, "train/tokens_per_second": 100.0}
    exchanged = {"exchange/participation": 0.5, "exchange/goodput": 0.75}
    assert wandb.logged == [(10, scalars), (12, exchanged), (12, {"eval/perplexity": 9.0})]
    written = [value for file in events(tmp_path) for event in file for value in event.summary.value]
    assert {value.tag: value.simple_value for value in written} == scalars | exchanged | {"eval/perplexity": 9.0}
    shown = [{**event, "time": 0} for event in recent.after(0)[0]]
    assert shown == [
        {"time": 0, "event": "figures", "step": 10, "loss": 2.5, "tokens_per_second": 100.0},
        {"time": 0, "event": "figures", "step": 12, "goodput": 0.75},
        {"time": 0, "event": "figures", "step": 12, "perplexity": 9.0},
    ]

"""W&B as the writer of metrics calls it."""

import types


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.runs: list[dict] = []
        self.logged: list[tuple[int, dict]] = []

    def init(self, **kwargs):
        self.runs.append(kwargs)
        return types.SimpleNamespace(log=lambda values, step: self.logged.append((step, values)), finish=lambda: None)

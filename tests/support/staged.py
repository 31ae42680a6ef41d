"""A pipeline that calls one stage a few times, and a small module to be that stage."""

import torch
from torch import nn


class Pipe:
    """Calls its stage a few times, each time with another tensor."""

    def __init__(self, stage, calls=4):
        self.stage, self.calls = stage, calls

    def __call__(self):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
        for index in range(self.calls):
            x = self.use(x, index)
        return x

    def use(self, x, index):
        return self.stage(x)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.inner(x))

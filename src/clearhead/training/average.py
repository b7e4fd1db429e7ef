"""A running mean of the weights: smoother than any single step's, and often better than the last one's.

    mean_t = (1 - m) (w_t + m w_(t-1) + m^2 w_(t-2) + ...) / (1 - m^t)        m is the memory, 0.999 or so

which is kept up step by step as mean += (1 - m) / (1 - m^t) (w - mean): the first step's mean is w itself,
and the weights before training have no part in it. The mean stands beside the optimizer's own averages, so
that a checkpoint holds it under the parameter's name, whole or shared out as they are. What is evaluated,
sampled and read from a run's folder is the mean; training goes on from the weights, which the probes show.

Source: Polyak and Juditsky 1992, https://doi.org/10.1137/0330046; the correction of the start as in Adam,
arXiv:1412.6980.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

NAME = "average"  # its key in the optimizer's state


class Average:
    """The running mean of all weights that an optimizer holds, with the memory `memory`."""

    def __init__(self, optimizer: Optimizer, memory: float) -> None:
        self.optimizer, self.memory = optimizer, memory
        self.count = 0  # of steps in the mean

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are; call it after each step."""
        self.count += 1
        rate = (1 - self.memory) / (1 - self.memory**self.count)
        for p in self._weights():
            state = self.optimizer.state[p]
            if NAME in state:
                state[NAME].lerp_(p, rate)
            else:
                state[NAME] = p.detach().clone()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the mean as its weights; afterwards it has its own again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for p in self._weights():
            if NAME in (state := self.optimizer.state[p]):
                own = p.detach().clone()
                p.copy_(state[NAME])
                state[NAME].copy_(own)

    def _weights(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

"""The mean of the weights: its formula, its bits, its place in a checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from clearhead.training.average import Average
from clearhead.training.checkpoint import load_checkpoint, save_checkpoint
from clearhead.training.muon import Muon
from clearhead.training.optim import AdamW


def walk(n: int, memory: float) -> tuple[nn.Linear, AdamW, Average, list[Tensor]]:
    """A layer after `n` steps, with the weights that each step left."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = AdamW(model.parameters(), lr=0.1)
    average, path = Average(optimizer, memory), []
    for _ in range(n):
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        optimizer.step()
        average.update()
        path.append(model.weight.detach().clone())
    return model, optimizer, average, path


@pytest.mark.parametrize(("n", "memory"), [(1, 0.999), (5, 0.9), (40, 0.9), (7, 0.5)])
def test_equals_the_sum_written_out(n, memory):
    """(1 - m) sum of m^age w / (1 - m^n): the weights before training have no part in it."""
    model, optimizer, _, path = walk(n, memory)
    weights = torch.tensor([(1 - memory) * memory**age / (1 - memory**n) for age in range(n)]).flip(0)
    expected = (torch.stack(path) * weights[:, None, None]).sum(0)
    torch.testing.assert_close(optimizer.state[model.weight]["average"], expected)


def test_in_place_and_back():
    """Inside, the model computes with the mean; after it, also after an error, with its own bits."""
    model, optimizer, average, path = walk(5, 0.9)
    mean = optimizer.state[model.weight]["average"].clone()
    with pytest.raises(RuntimeError, match="inside"), average.in_place():
        assert torch.equal(model.weight, mean)
        raise RuntimeError("inside")
    assert torch.equal(model.weight, path[-1])
    assert torch.equal(optimizer.state[model.weight]["average"], mean)


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path):
    """10 steps are 5, a checkpoint, and 5 more: weights, moments, mean; a resting weight has its mean too."""

    def fresh() -> tuple[nn.Sequential, Muon, Average]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        groups = [
            {"params": [model[0].weight], "muon": True},
            {"params": [model[0].bias, *model[1].parameters()]},
        ]
        optimizer = Muon(groups, lr=0.05)
        return model, optimizer, Average(optimizer, 0.9)

    def steps(model: nn.Sequential, optimizer: Muon, average: Average, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            model[0].forward(x).square().sum().backward()  # the second layer rests
            optimizer.step()
            optimizer.zero_grad()
            average.update()

    straight = fresh()
    steps(*straight, 0, 10)
    model, optimizer, average = fresh()
    steps(model, optimizer, average, 0, 5)
    save_checkpoint(tmp_path, 5, model, optimizer, {"averaged": average.count})
    model, optimizer, average = fresh()
    average.count = load_checkpoint(tmp_path, model, optimizer)["averaged"]
    steps(model, optimizer, average, 5, 10)
    for p, q in zip(straight[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
        ours, theirs = straight[1].state[p], optimizer.state[q]
        assert ours.keys() == theirs.keys() and "average" in ours
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

"""Fixtures of the model's tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run."""
    torch.manual_seed(0)

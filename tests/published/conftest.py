"""Fixtures of the tests of published weights."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run."""
    torch.manual_seed(0)

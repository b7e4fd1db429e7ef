"""Fixtures that every chapter's tests may use."""

from collections.abc import Iterator

import pytest
import torch
from jaxtyping import config as jaxtyping_config

# The tensors of tests are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch the type check of the test run off: a user's mistake must be caught by the library itself."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", before)

"""Fixtures of the tests of published weights."""

import os
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The library that the families must equal: imported once, silent, and never on the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module

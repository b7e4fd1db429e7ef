"""Fixtures of the tests of training."""

import os
from typing import Any

import pytest


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The library that objectives and heads must equal: imported once, silent, never on the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module

"""Fixtures that every chapter's tests may use."""

import os
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture(scope="session")
def transformers() -> Any:
    """What published families and objectives must equal: imported once, silent, never on the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


# What `make check` leaves to `make test`: files whose tests are quick each, but many.
LEFT_TO_MAKE_TEST = {
    "test_activations", "test_batches", "test_cache", "test_chat", "test_checkpoint", "test_classes",
    "test_cli", "test_config_json", "test_corpus", "test_decode", "test_dry_run", "test_edits",
    "test_encode_examples", "test_encoder_decoder", "test_equal_losses", "test_evaluate",
    "test_experts", "test_families", "test_families_encoders", "test_families_experts", "test_formats",
    "test_incremental", "test_invariants", "test_learner", "test_learning", "test_loop",
    "test_mistakes", "test_older_files", "test_prepare", "test_probe", "test_provenance",
    "test_published_sizes", "test_recipe", "test_record", "test_selfcheck", "test_shapes",
    "test_shared_work", "test_sweep",
    "test_tasks", "test_tokenizer", "test_twins",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `make check` leaves out."""
    for item in items:
        if item.path.stem in LEFT_TO_MAKE_TEST or item.path.parent.name == "server":
            item.add_marker(pytest.mark.slow)

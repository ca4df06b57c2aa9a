"""Fixtures that every test file shares. Models are session-scoped: tests must not change them."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import tiny_model

# The first example of a property may compile a kernel; a wall clock would make it flaky.
settings.register_profile("lab", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("lab")

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_llama():
    """A 3-layer float64 Llama with tied embeddings (vocabulary 97)."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def real_model():
    """The 135M default model in float32; fetched once into the user cache."""
    from quasar_lab import load

    return load()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)

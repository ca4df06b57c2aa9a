"""Fixtures that every test file shares. Models are session-scoped: tests must not change them."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

sys.path.insert(0, str(Path(__file__).parent))

# Shapes and dtypes in the annotations are enforced while the tests run. Modules of compiled
# functions are left out (the compilers read the function itself, not a wrapper), and so are
# packages' own files, whose names would stand for every module below them.
_COMPILED = re.compile(r"^\s*(import|from) (numba|llvmlite|triton)\b", re.MULTILINE)
_PACKAGE = Path(__file__).parent.parent / "quasar_lab"
install_import_hook(
    [
        ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)
        for path in sorted(_PACKAGE.rglob("*.py"))
        if path.name != "__init__.py" and not _COMPILED.search(path.read_text())
    ],
    "typechecker.check",
)

from tiny_models import tiny_model  # noqa: E402

# The first example of a property may compile a kernel; a wall clock would make it flaky.
settings.register_profile("lab", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("lab")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny shapes are not worth a measurement; the tests of the measurement turn it on themselves.
os.environ.setdefault("QUASAR_LAB_AUTOTUNE", "0")


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


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny Llama checkpoint on disk with a chat template and a byte-level tokenizer."""
    from tiny_checkpoints import write_folder

    return write_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


@pytest.fixture(scope="session")
def tiny_language_model(tiny_folder):
    """The tiny checkpoint as `load` gives it (float32)."""
    from quasar_lab import load

    return load(tiny_folder)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A headless Chromium or Chrome of this machine; skips where there is none.

    For a module: while playwright runs, no other test could use asyncio.
    """
    from quasar_lab.doctor_checks import find_browser

    path = find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome on the path (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
                   "--disable-background-networking", "--disable-component-update"]  # fmt: skip
        browser = driver.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()

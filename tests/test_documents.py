"""The documents: their links lead somewhere, and what they tell people to type works."""

import re
from pathlib import Path

import pytest

from quasar_lab import architectures

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), link


def test_the_steps_for_an_own_model_run(tiny_folder, monkeypatch) -> None:
    """All of its Python, in its order, on a tiny checkpoint and with shorter texts."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_model.md").read_text(), re.S)
    assert len(blocks) >= 6
    monkeypatch.setattr(architectures, "_REGISTRY", list(architectures._REGISTRY))
    text = "\n".join(blocks)
    for long, short in (
        ("Qwen/Qwen3-0.6B", str(tiny_folder)),
        ("max_new_tokens=256", "max_new_tokens=8"),
        ("max_new_tokens=64", "max_new_tokens=8"),
        ("run_benchmark(lab)", 'run_benchmark(lab, tasks=("alpaca",), limit=1, max_new_tokens=4)'),
    ):
        assert long in text
        text = text.replace(long, short)
    found: dict[str, object] = {}
    exec(compile(text, "own_model.md", "exec"), found)
    assert len(found["summary"]) >= 4 and found["run"].tokens

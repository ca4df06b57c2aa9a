"""benchmarks/serving_check.py: what its comparisons say, without a server."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import serving_check

from quasar_lab import QuantizationConfig, export_compressed_tensors, load_task, quantize


def text(tokens: list[int], **more) -> dict:
    return {"question": "q 1", "prompt": [5, 6, 7], "tokens": tokens, **more}


def test_texts_that_part_are_judged_by_the_margin_there(tiny_llama) -> None:
    with torch.no_grad():
        logits = tiny_llama(torch.tensor([[5, 6, 7, 11]])).logits[0, -1]
    [row] = serving_check.compare_texts(
        [text([11, 12, 13])], [text([11, 20, 13])], tiny_llama
    ).to_dict("records")
    assert (row["same"], row["tokens"]) == (1, 3)
    assert row["margin"] == pytest.approx(float((logits[12] - logits[20]).abs()))
    same = serving_check.compare_texts([text([1, 2])], [text([1, 2])], tiny_llama)
    assert same.loc[0, "same"] == 2 and same.loc[0, "margin"] == 0


def test_a_server_is_compared_token_by_token(tiny_llama) -> None:
    ids = [5, 6, 7, 11, 12]
    with torch.no_grad():
        logits = tiny_llama(torch.tensor([ids])).logits[0]
    expected = [
        float(logits[i].log_softmax(-1)[token]) for i, token in enumerate(ids[1:])
    ]  # fmt: skip
    served = text([11, 12], log_probabilities=[value + 0.5 for value in expected])
    off, yardstick = serving_check.deviations([served], tiny_llama)
    assert list(off) == pytest.approx([0.5] * 4)
    assert (yardstick < 1e-4).all()  # full precision does not amplify a disturbance of 1e-7


def test_transformers_is_compared_on_prompts(tiny_language_model, tmp_path, monkeypatch) -> None:
    lab, prompts = tiny_language_model, load_task("gsm8k", 2)
    monkeypatch.setattr(serving_check, "TASKS", {"t": ""})
    monkeypatch.setattr(serving_check, "load_task", lambda task, limit: prompts)
    quantized = quantize(lab.model, None, QuantizationConfig(smoothing="none"))
    checkpoint = export_compressed_tensors(quantized, tmp_path / "w8a8")
    found = serving_check.measure_transformers(checkpoint, lab, quantized)
    assert found["tokens"] == sum(len(lab.encode_chat(prompt.turns[0])) for prompt in prompts)
    # another step of activations, the last bit, and rounding as a whole
    assert 1e-3 < found["transformers"]["relative"] < 0.3
    assert found["transformers_to_lab_simulating"]["relative"] == 0 and found["passed"]
    assert found["lab_disturbed_by_1e-7"]["relative"] < found["transformers"]["relative"]
    assert 0 < found["lab_full_precision"]["kl"] < 1


def test_a_wrong_engine_fails(tiny_llama, monkeypatch) -> None:
    """The check must be able to fail: another text, and log-probabilities that are off."""
    ids = [5, 6, 7, 11, 12]
    right = serving_check.own_log_probabilities(tiny_llama, ids).tolist()
    lab = type("Lab", (), {"model": tiny_llama})
    good, bad = text([11, 12], log_probabilities=right), text([12, 11])
    results = {name: {"texts": [good], "passed": True} for name in serving_check.PARTS}
    checks = serving_check.judge(results, lab, tiny_llama)
    assert all(check.get("passed", True) for check in checks.values())
    results["fp32-ngram"] = {"texts": [bad]}
    results["w8a8"] = {"texts": [text([11, 12], log_probabilities=[v - 1 for v in right])]}
    del results["transformers"]["passed"]  # measured before the round trip was
    failed = [n for n, c in serving_check.judge(results, lab, tiny_llama).items()
              if not c.get("passed", True)]  # fmt: skip
    assert failed == ["fp32: text, n-gram against plain",
                      "W8A8: log-probabilities, vLLM against the lab",
                      "W8A8: logits, transformers against the lab"]  # fmt: skip

"""Peers in processes of their own, the table of a run, and the check of its texts."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import tiny_model

from quasar_lab import Prompt, SamplingConfig, UserError, generate, run_benchmark
from quasar_lab import peers as peers_module
from quasar_lab.engines import LEAN
from quasar_lab.methods import DraftSettings
from quasar_lab.peers import PEERS, PeerProcess, UnavailableError, checked_peers
from quasar_lab.peers.gguf_file import gguf_name, write_q8_0
from quasar_lab.throughput import comparisons, running_peers, text_check, throughput_table

GREEDY = SamplingConfig()
TASKS = {"code": [Prompt(1, "code", ("x = x + 1; x = x +",))]}

# A backend that needs nothing: it repeats the prompt, one token a step.
ECHO = """
class Echo:
    def __init__(self, setup):
        if setup["model"] == "broken":
            raise ImportError("No module named 'echo'")
        print("a library that talks")
        self.speculative = setup["speculative"]
        self.first_seconds = 9.0  # whoever compiles does so while it answers first
    def answer(self, prompt, max_new_tokens):
        tokens = (prompt * max_new_tokens)[:max_new_tokens]
        steps = None if self.speculative else len(tokens) - 1
        first, self.first_seconds = self.first_seconds, 0.5
        return {"tokens": tokens, "first_seconds": first, "decode_seconds": 2.0,
                "in_first_step": 1, "steps": steps}
BACKENDS["llama_cpp"] = Echo
"""


@pytest.fixture
def echo(monkeypatch, tmp_path):
    """llama_cpp stands for the echo: the protocol without a package."""
    source = peers_module._WORKER.read_text()
    head, tail = source.split("\n\ndef main()")
    worker = tmp_path / "worker.py"
    worker.write_text(head + ECHO + "\n\ndef main()" + tail)
    monkeypatch.setattr(peers_module, "_WORKER", worker)
    return {"model": "here"}


def test_a_peer_is_counted_from_its_first_token(echo) -> None:
    with PeerProcess(PEERS["llama_cpp"], echo) as peer:
        row = peer.measure(torch.tensor([7, 8]), GREEDY, 5)
        process = peer._process
    assert row["tokens"] == [7, 8, 7, 8, 7] and row["new_tokens"] == 4
    assert row["tokens_per_second"] == 2.0 and row["prefill_seconds"] == 0.5
    assert row["steps"] == 4 and row["mean_acceptance_length"] == 1.0
    assert process.poll() is not None  # nothing is left behind


def test_an_unavailable_peer_tells_why(echo, tmp_path) -> None:
    with pytest.raises(UnavailableError, match="No module named 'echo'"):
        PeerProcess(PEERS["llama_cpp"], {"model": "broken"})
    with pytest.raises(UnavailableError, match="No such file"):
        PeerProcess(PEERS["vllm"], echo, python=str(tmp_path / "python"))
    with pytest.raises(UserError, match="unknown peer 'exllama'"):
        checked_peers(["llama_cpp", "exllama"])


def test_peers_take_turns_with_the_methods_and_resume(echo, tiny_language_model, tmp_path) -> None:
    options = dict(tasks=TASKS, max_new_tokens=4, results=tmp_path / "rows.jsonl")
    with PeerProcess(PEERS["llama_cpp_lookup"], echo) as peer:
        rows = run_benchmark(tiny_language_model, ["ngram"], peers=[peer], **options)
        assert list(rows["method"]) == ["plain", "ngram", "llama_cpp_lookup"]
        peer.close()  # a finished run asks nobody again
        again = run_benchmark(tiny_language_model, ["ngram"], peers=[peer], **options)
    assert again["tokens"].tolist() == rows["tokens"].tolist()
    with pytest.raises(UserError, match="temperature 0 only"):
        run_benchmark(tiny_language_model, ["plain"], TASKS, (0.5,), peers=[peer])
    table = throughput_table(rows)
    assert table.loc["llama_cpp_lookup", "label"] == "llama.cpp Q8_0, prompt lookup"
    assert np.isnan(table.loc["llama_cpp_lookup", "L"]) and table.loc["plain", "L"] == 1


def test_transformers_writes_what_the_lab_writes(tiny_folder, tiny_language_model) -> None:
    """The real worker: plain and prompt lookup are greedy decoding of the same float32 weights."""
    prompt = tiny_language_model.encode_chat("one two one two")
    mine = generate(tiny_language_model.model, prompt, max_new_tokens=12)
    setup = dict(model=str(tiny_folder), dtype="float32", threads=1, draft_tokens=3, max_ngram=2)
    for name in ("transformers", "transformers_lookup"):
        with PeerProcess(PEERS[name], setup) as peer:
            row = peer.measure(prompt, GREEDY, 12)
        assert row["tokens"] == mine.tokens
        assert row["decode_seconds"] > 0 and row["new_tokens"] < len(row["tokens"])
        if name == "transformers":
            assert row["steps"] == row["new_tokens"] == len(mine.tokens) - 1


def test_peers_that_cannot_run_are_skipped(echo, tiny_language_model, tiny_folder) -> None:
    python = str(tiny_folder / "no-python")
    names = ["llama_cpp", "vllm"]
    draft = DraftSettings()
    with running_peers(names, tiny_language_model, draft, vllm_python=python) as (running, skipped):
        assert [peer.peer.name for peer in running] == ["llama_cpp"]
    assert list(skipped) == ["vllm"] and "No such file" in skipped["vllm"]
    assert running[0]._process.poll() is not None


def test_the_text_check_finds_a_wrong_token() -> None:
    columns = ["method", "task", "question_id", "turn", "tokens", "engine"]
    texts = {
        "plain": [1, 2, 3, 4],
        "ngram": [1, 2, 3, 4],
        "int8": [1, 9],
        "quasar": [1, 8],
        "lossless": [1, 2, 3, 4],
        "llama_cpp": [1, 2, 9, 9],
    }
    engines = {"llama_cpp": "llama.cpp", "ngram": "transformers"}
    rows = [[name, "a", 1, 0, text, engines.get(name, LEAN)] for name, text in texts.items()]
    check = text_check(pd.DataFrame(rows, columns=columns))
    assert list(check["same"]) == [
        int(n in ("plain", "ngram", "int8", "lossless")) for n in check.index
    ]
    # the last bits of transformers depend on how many tokens go together
    assert list(check.index[~check["must"]]) == ["llama_cpp", "ngram"]
    assert check.loc["quasar", "reference"] == "int8" and check.loc["quasar", "prefix"] == 0.5
    assert (
        check.loc["llama_cpp", "reference"] == "plain" and check.loc["llama_cpp", "prefix"] == 0.5
    )


def test_comparisons_say_what_was_reached_and_split_the_gain() -> None:
    """In all 240 / 100 tokens a second: 1.2 from longer steps, 2 from cheaper ones."""
    table = pd.DataFrame(
        {
            "tokens_per_second": {"quasar": 100.0, "ngram": 60.0, "transformers": 10.0},
            "pooled": {"quasar": 240.0, "ngram": 100.0, "transformers": 12.0},
            "L": {"quasar": 1.8, "ngram": 1.5, "transformers": np.nan},
        }
    )
    lines = dict(line.split(": ", 1) for line in comparisons(table))
    quasar = "n-gram, INT8 (Quasar) over "
    assert lines[quasar + "transformers"] == "10.00x; in all 20.00x; at least 8x wanted: reached"
    assert lines[quasar + "n-gram"] == (
        "1.67x; in all 2.40x = L 1.20 x step 2.00; at least 2x wanted: missed"
    )
    assert lines["n-gram, INT8 + bf16 over n-gram, bf16"] == "not measured"


@pytest.mark.parametrize("family", ["llama", "llama_untied", "qwen2", "qwen3"])
def test_the_gguf_file_holds_the_model(family: str, tmp_path) -> None:
    """Read back with the gguf package: every parameter is there, within Q8_0's rounding."""
    import gguf

    model = tiny_model(family, dtype=torch.float32, hidden_size=64, intermediate_size=96)
    write_q8_0(model, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    parameters = dict(model.named_parameters())
    assert set(tensors) == {gguf_name(name) for name in parameters}
    for name, parameter in parameters.items():
        tensor = tensors[gguf_name(name)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(parameter.shape)
        expected = parameter.float().numpy()
        if family.startswith("llama") and (".q_proj" in name or ".k_proj" in name):
            # neighbours are turned together there: rows i and i + d/2 of a head stand side by side
            heads = 4 if ".q_proj" in name else 2
            order = np.arange(len(expected)).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
            expected = expected[order]
        # half a step of 1/127 of the block's largest, and the fp16 rounding of that step
        assert np.abs(values - expected).max() <= np.abs(expected).max() * (0.5 / 127 + 2**-10)


def test_a_gguf_file_of_an_unknown_family_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="'opt' is not written"):
        write_q8_0(tiny_model("opt"), tmp_path / "model.gguf")


def test_the_worker_needs_nothing_of_the_lab() -> None:
    """It must run under another Python, which has vLLM and not quasar-lab."""
    code = f"import runpy; runpy.run_path({str(peers_module._WORKER)!r}, run_name='x')"
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

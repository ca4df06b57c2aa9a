"""Every method beside transformers, llama.cpp and vLLM, in turns, in one run, on the same weights.

    python benchmarks/throughput.py [--limit 2] [--max-new-tokens 128] [--vllm-python PYTHON]

Greedy, batch 1, the same prompts and counting for all. Peers that are not installed are skipped
with the reason (`pip install -e '.[peers]'` brings llama.cpp). A run that was killed continues
where it stopped when it is started again with the same settings. Writes throughput.jsonl (every
generation), throughput.json and throughput.png into --output. The exit code is 1 if a method on
the lean decoder did not write the text that its own target writes plainly.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from quasar_lab import load, run_benchmark
from quasar_lab.errors import UserError
from quasar_lab.machine import describe_machine
from quasar_lab.methods import METHODS, DraftSettings
from quasar_lab.peers import PEERS
from quasar_lab.plots import plot_speed
from quasar_lab.results import write_atomically
from quasar_lab.tasks import TASKS
from quasar_lab.throughput import comparisons, running_peers, text_check, throughput_table

# the pruned verifiers change the text; `quasar-lab bench` measures them
LAB = [name for name in METHODS if "pruned" not in name]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def measure(options: argparse.Namespace) -> int:
    """Run, print, write; the exit code."""
    model = load(options.model, dtype=options.dtype)
    draft = DraftSettings(options.draft_tokens)
    with running_peers(
        options.peers, model, draft, vllm_python=options.vllm_python
    ) as (peers, skipped):  # fmt: skip
        rows = run_benchmark(
            model,
            options.methods,
            options.tasks,
            limit=options.limit,
            max_new_tokens=options.max_new_tokens,
            draft=draft,
            peers=peers,
            results=options.output / "throughput.jsonl",
        )
    table, texts = throughput_table(rows), text_check(rows)
    lines = comparisons(table)
    wrong = texts[texts["must"] & (texts["same"] < texts["of"])]
    result = {
        "machine": describe_machine(),
        "model": model.name,
        "dtype": str(model.model.dtype),
        "methods": json.loads(table.reset_index(names="method").to_json(orient="records")),
        "texts": json.loads(texts.reset_index(names="method").to_json(orient="records")),
        "skipped": skipped,
        "comparisons": lines,
    }
    write_atomically(options.output / "throughput.json", json.dumps(result, indent=1))
    plot_speed(rows, table).savefig(options.output / "throughput.png", dpi=130)
    print(table.to_string(float_format="{:.2f}".format), "", sep="\n")
    print(texts.to_string(float_format="{:.3f}".format), "", sep="\n")
    print(
        "\n".join(
            [*lines, *(f"{PEERS[name].label}: skipped, {why}" for name, why in skipped.items())]
        )
    )
    return 1 if len(wrong) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a preset, a Hub id or a folder")
    parser.add_argument("--dtype", default=None, help="of full precision (default: the device's)")
    parser.add_argument("--methods", type=_names, default=LAB, metavar="NAMES")
    parser.add_argument("--peers", type=_names, default=list(PEERS), metavar="NAMES")
    parser.add_argument("--tasks", type=_names, default=list(TASKS), metavar="NAMES")
    parser.add_argument("--limit", type=int, default=2, help="prompts a task (2)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm-python", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--output", type=Path, default=Path("reports"), metavar="FOLDER")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        return measure(options)
    except UserError as error:
        print(f"throughput: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

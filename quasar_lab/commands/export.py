"""`quasar-lab export`: a model, quantised, as a checkpoint for vLLM and transformers."""

import argparse
import json
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write the quantised model as a checkpoint that vLLM and transformers load",
        description="Calibrate and quantise a model as the demo does, compare it with full "
        "precision on its own text, and write a compressed-tensors checkpoint with a model card.",
    )
    export.add_argument("output", type=Path, metavar="FOLDER", help="a new folder")
    export.add_argument(
        "--model", help="a preset, a Hub id or a local folder (default: smollm2-135m)"
    )
    export.add_argument("--dtype", help="of what stays in full precision: auto (the model's own), "
                        "float32, bfloat16, float16 (default: float32 on a CPU)")  # fmt: skip
    export.add_argument("--licence", help="of the base model, for the card (presets know theirs)")
    export.add_argument("--no-fidelity", action="store_true", help="skip the comparison")
    export.add_argument("--json", action="store_true", help="print JSON instead of the text")
    export.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from quasar_lab.benchmark import quantize_for_benchmark
    from quasar_lab.export import export_compressed_tensors, new_folder
    from quasar_lab.loading import DEFAULT_MODEL, LanguageModel, load
    from quasar_lab.progress import say

    new_folder(arguments.output)  # before minutes of work, not after
    model = load(arguments.model or DEFAULT_MODEL, dtype=arguments.dtype)
    say(f"calibrating and quantising {model.name}")
    quantized = quantize_for_benchmark(model)
    fidelity = None if arguments.no_fidelity else _fidelity(model, quantized)
    folder = export_compressed_tensors(
        LanguageModel(quantized, model.tokenizer, model.name),
        arguments.output,
        licence=arguments.licence,
        calibration_data="the built-in texts of quasar-lab",
        fidelity=fidelity,
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    if arguments.json:
        means = None if fidelity is None else fidelity[["kl", "tv", "top1_match"]].mean().to_dict()
        print(json.dumps({"folder": str(folder), "bytes": size, "fidelity": means}))
        return
    print(f"{folder}: {size / 1e6:.0f} MB; its README.md is the model card")
    print(f"serve it: quasar-lab serve-command {folder}")


def _fidelity(model: Any, quantized: Any) -> Any:
    """`compare_models` on the model's own greedy answers to the first prompt of each task."""
    from quasar_lab.drafting import NGramDrafter
    from quasar_lab.engines import build_target
    from quasar_lab.fidelity_runs import compare_models, greedy_continuations
    from quasar_lab.progress import say
    from quasar_lab.tasks import TASKS, conversation, load_task

    say("comparing with full precision")
    prompts = [model.encode_chat(conversation(load_task(task, 1)[0])) for task in TASKS]
    target = build_target(model.model)
    texts = greedy_continuations(target, prompts, max_new_tokens=48, drafter=NGramDrafter())
    return compare_models(model.model, quantized, texts)

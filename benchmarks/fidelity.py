#!/usr/bin/env python
"""How far W8A8 takes the output distribution from full precision, recipe by recipe.

    python benchmarks/fidelity.py                          every built-in prompt, 64 tokens each
    python benchmarks/fidelity.py --limit 2 --max-new-tokens 32
    python benchmarks/fidelity.py --recipes none m2 "alpha auto+all, budget .004"

The texts are the full-precision model's own greedy continuations (kept in
reports/fidelity_texts.json); every recipe reads the same tokens. Scales are calibrated on texts
that share nothing with the prompts, and budget_kl is measured on continuations of those. Finished
recipes are kept in reports/fidelity.jsonl, where a run that was stopped goes on; the tables are
reports/fidelity.json and reports/fidelity.md.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from quasar_lab import NGramDrafter, QuantizationConfig, UserError, calibrate, load, quantize
from quasar_lab.architectures import GROUP_KINDS
from quasar_lab.benchmark import calibration_batches
from quasar_lab.engines import build_target
from quasar_lab.fidelity import compare_logits
from quasar_lab.fidelity_runs import (
    Text,
    greedy_continuations,
    next_token_logits,
    summarize_fidelity,
)
from quasar_lab.loading import LanguageModel
from quasar_lab.machine import describe_machine
from quasar_lab.mixed_precision import sensitivity
from quasar_lab.progress import say
from quasar_lab.quantization import W8A8Linear, quantization_report
from quasar_lab.results import ResultFile, write_atomically
from quasar_lab.structure import in_bfloat16
from quasar_lab.tasks import TASKS, load_task

NO_DOWN = ("lm_head", "down_proj")
# Two recipes that say what stands in the way of less.
MOST_SENSITIVE = "alpha auto+all, 5 % most sensitive full"
WEIGHTS_ALONE = "alpha auto+all, activations full"
# What the INT8 layers leave in bfloat16, as the paper does; and all of the model.
REST_BF16, ALL_BF16 = "alpha auto+all, the rest bfloat16", "bfloat16, nothing INT8"


def recipes() -> dict[str, tuple[QuantizationConfig, float | None]]:
    """Name -> (configuration, KL budget). "+all" smooths v -> o and up -> down as well."""
    table: dict[str, tuple[QuantizationConfig, float | None]] = {}

    def add(name: str, *args: Any, budget_kl: float | None = None, **kwargs: Any) -> None:
        table[name] = (QuantizationConfig(*args, **kwargs), budget_kl)

    norms = ("norms",)
    add("none", "none")
    for alpha in (0.3, 0.5, 0.7, 0.85):
        add(f"smoothquant {alpha}", "smoothquant", alpha, groups=norms)
    add("alpha auto", "smoothquant", "auto", groups=norms)
    add("m2", "m2", groups=norms)
    for alpha in (0.5, 0.6, 0.7):
        add(f"smoothquant {alpha}+all", "smoothquant", alpha, groups=GROUP_KINDS)
    add("alpha auto+all", "smoothquant", "auto", groups=GROUP_KINDS)
    add("m2+all", "m2", groups=GROUP_KINDS)
    add("none, down_proj full", "none", skip=NO_DOWN)
    add("smoothquant 0.5, down_proj full", "smoothquant", 0.5, groups=norms, skip=NO_DOWN)
    add("m2, down_proj full", "m2", groups=norms, skip=NO_DOWN)
    add("alpha auto+all, down_proj full", "smoothquant", "auto", groups=GROUP_KINDS, skip=NO_DOWN)
    add("alpha auto+all, lm_head INT8", "smoothquant", "auto", groups=GROUP_KINDS, skip=())
    add("alpha auto+all, budget .004", "smoothquant", "auto", groups=GROUP_KINDS, budget_kl=0.004)
    add(MOST_SENSITIVE, "smoothquant", "auto", groups=GROUP_KINDS)
    add(WEIGHTS_ALONE, "smoothquant", "auto", groups=GROUP_KINDS)
    add(REST_BF16, "smoothquant", "auto", groups=GROUP_KINDS)
    add(ALL_BF16, "none", skip=("*",))
    return table


def float_activations_(quantized: nn.Module) -> nn.Module:
    """The same INT8 weights, but multiplied by activations that are not rounded; in place."""
    for name, linear in list(quantized.named_modules()):
        if isinstance(linear, W8A8Linear):
            bias = linear.bias is not None
            plain = nn.Linear(linear.in_features, linear.out_features, bias=bias)
            with torch.no_grad():
                plain.weight.copy_(linear.qweight * linear.weight_scale[:, None])
                if bias:
                    plain.bias.copy_(linear.bias)
            parent, _, child = name.rpartition(".")
            setattr(quantized.get_submodule(parent), child, plain)
    return quantized


def engine_logits(model: nn.Module, ids: torch.Tensor, start: int) -> torch.Tensor:
    """`next_token_logits` by the lean decoder, if it knows the model: float32 between what is in
    bfloat16 (weights, KV cache, rotary tables), where transformers rounds every operation."""
    return build_target(model).forward(ids[:-1], num_logits=len(ids) - start)


def reference_texts(
    model: LanguageModel, limit: int | None, max_new_tokens: int, file: Path
) -> tuple[list[Text], list[torch.Tensor]]:
    """(greedy continuations of the prompts, whole sequences of calibration continuations)."""
    key = f"{model.name}, limit {limit}, {max_new_tokens} tokens"
    if file.exists():
        stored = json.loads(file.read_text())
        if stored["key"] == key:
            texts = [Text(tuple(p), tuple(t), label) for p, t, label in stored["texts"]]
            return texts, [torch.tensor(ids) for ids in stored["evaluation"]]
    say("full precision writes the texts")
    prompts = [(task, prompt.turns[0]) for task in TASKS for prompt in load_task(task, limit)]
    texts = greedy_continuations(
        model,
        [model.encode_chat(turn) for _, turn in prompts],
        labels=[task for task, _ in prompts],
        max_new_tokens=max_new_tokens,
        drafter=NGramDrafter(),
    )
    others = greedy_continuations(
        model,
        calibration_batches(model)[::4],
        max_new_tokens=max_new_tokens,
        drafter=NGramDrafter(),
    )
    # a little of the prompt as context: the budget is about what the model writes itself
    evaluation = [torch.tensor([*text.prompt[-16:], *text.tokens]) for text in others]
    content = {
        "key": key,
        "texts": [[text.prompt, text.tokens, text.label] for text in texts],
        "evaluation": [ids.tolist() for ids in evaluation],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content))
    return texts, evaluation


def markdown(table: pd.DataFrame) -> str:
    """The table of docs/measurements.md."""
    lines = [
        "| recipe | mean KL (95 % interval) | mean TV | top-1 | full-precision linears |",
        "|---|---|---|---|---|",
    ]
    for name, row in table.iterrows():
        interval = f"{row.kl:.4f} ({row.kl_low:.4f} to {row.kl_high:.4f})"
        lines.append(
            f"| {name} | {interval} | {row.tv:.3f} | {100 * row.top1:.1f} % | {row.full} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="what load() takes")
    parser.add_argument("--limit", type=int, help="prompts a task (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="(default: all)")
    parser.add_argument("--out", type=Path, default=Path("reports"))
    arguments = parser.parse_args()
    known = recipes()
    chosen = arguments.recipes or list(known)
    for name in chosen:
        if name not in known:
            parser.error(f"unknown recipe {name!r}: choose from {'; '.join(known)}")

    model = load(arguments.model)
    file = arguments.out / "fidelity_texts.json"
    texts, evaluation = reference_texts(model, arguments.limit, arguments.max_new_tokens, file)
    start = time.perf_counter()
    stats = calibrate(model, calibration_batches(model))
    calibration_seconds = time.perf_counter() - start
    say(f"calibrated in {calibration_seconds:.1f} s: {stats!r}")

    contexts = [(torch.tensor([*text.prompt, *text.tokens]), len(text.prompt)) for text in texts]
    expected = [next_token_logits(model.model, ids, start) for ids, start in contexts]
    settings = {"model": model.name, "texts": len(texts), "tokens": sum(map(len, expected))}
    done = ResultFile(arguments.out / "fidelity.jsonl", settings)
    for name in chosen:
        if any(row["recipe"] == name for row in done.rows):
            continue
        config, budget_kl = known[name]
        start = time.perf_counter()
        in_half = name in (REST_BF16, ALL_BF16)
        source = in_bfloat16(model.model) if in_half else model
        quantized = quantize(source, stats, config, budget_kl=budget_kl, evaluation=evaluation)
        if name == MOST_SENSITIVE:
            order = sensitivity(model.model, quantized, evaluation, num_tokens=256).name
            worst = tuple(order[: len(order) // 20])
            say(f"most sensitive: {', '.join(worst)}")
            quantized = quantize(model, stats, replace(config, skip=("lm_head", *worst)))
        seconds = time.perf_counter() - start
        report = quantization_report(quantized)
        full = report[(report.precision == "full") & (report.name != "lm_head")]
        if name == WEIGHTS_ALONE:
            float_activations_(quantized)
        frames = []
        logits = engine_logits if in_half else next_token_logits
        for index, (ids, first) in enumerate(contexts):
            table = compare_logits(expected[index], logits(quantized, ids, first))
            frames.append(table.assign(text=index, label=texts[index].label))
        frame = pd.concat(frames, ignore_index=True).assign(recipe=name)
        summary = summarize_fidelity(frame, "recipe").iloc[0]
        by_task = summarize_fidelity(frame, "label")[["kl", "tv", "top1"]]
        done.append(
            {
                "recipe": name,
                **{key: float(value) for key, value in summary.items()},
                "full": f"{len(full)} of {len(report) - 1}",
                "quantize_seconds": seconds,
                "by_task": by_task.to_dict("index"),
            }
        )
        say(f"{name}: mean KL {summary.kl:.4f}, quantised in {seconds:.1f} s")

    table = pd.DataFrame([row for row in done.rows if row["recipe"] in chosen]).set_index("recipe")
    print(markdown(table.loc[chosen]))
    result = {
        **settings,
        "machine": describe_machine(),
        "calibration_seconds": calibration_seconds,
        "recipes": done.rows,
    }
    write_atomically(arguments.out / "fidelity.json", json.dumps(result, indent=1))
    write_atomically(arguments.out / "fidelity.md", markdown(table.loc[chosen]))
    say(f"wrote {arguments.out / 'fidelity.json'} and fidelity.md")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"fidelity: error: {error}", file=sys.stderr)
        sys.exit(2)

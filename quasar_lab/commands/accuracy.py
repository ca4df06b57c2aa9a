"""`quasar-lab accuracy` and `quasar-lab perplexity`: what INT8 costs in quality."""

import argparse
import json
from pathlib import Path
from typing import Any

from quasar_lab.commands.arguments import named_path, names


def add(commands: Any) -> None:
    accuracy = commands.add_parser(
        "accuracy",
        help="right answers of full precision against INT8, through lm-eval",
        description="Ask both models the same questions and test the difference (McNemar). Needs "
        'lm-eval: pip install "quasar-lab[accuracy]".',
    )
    accuracy.add_argument("--tasks", type=names, default=(), metavar="NAMES",
                          help="mmlu_pro, ceval, math, gsm8k or any lm-eval task; fetched from the "
                          "Hub")  # fmt: skip
    accuracy.add_argument("--questions", type=named_path, action="append", default=[],
                          metavar="NAME=FILE", help="a local file of questions, one JSON object a "
                          "line: question, answer and, for a multiple choice, choices")  # fmt: skip
    accuracy.add_argument("--limit", type=int, help="questions a task (default: all)")
    accuracy.add_argument("--fewshot", type=int, help="worked examples (default: the task's)")
    accuracy.add_argument("--chat", action="store_true", help="ask through the chat template")
    _add_common(accuracy)
    accuracy.set_defaults(run=run)

    text = commands.add_parser(
        "perplexity",
        help="perplexity of full precision and INT8 on a text file",
        description="How well both models predict a text. Needs no network and no extra.",
    )
    text.add_argument("file", type=Path, help="a UTF-8 text file")
    text.add_argument("--window", type=int, help="tokens a forward (default: 1024)")
    _add_common(text)
    text.set_defaults(run=run_perplexity)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a preset, a Hub id or a folder (default: smollm2-135m)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(arguments: argparse.Namespace) -> None:
    from quasar_lab.accuracy import compare_accuracy, local_task, require_lm_eval
    from quasar_lab.benchmark import quantize_for_benchmark
    from quasar_lab.loading import DEFAULT_MODEL, load

    # before minutes of loading and calibrating
    require_lm_eval()
    for name, path in arguments.questions:
        local_task(name, path)
    model = load(arguments.model or DEFAULT_MODEL)
    table = compare_accuracy(
        model,
        quantize_for_benchmark(model),
        arguments.tasks,
        questions=dict(arguments.questions),
        limit=arguments.limit,
        num_fewshot=arguments.fewshot,
        chat=arguments.chat,
    )
    if arguments.json:
        print(table.to_json(orient="records"))
        return
    print(table.to_string(index=False, float_format="{:.3f}".format))


def run_perplexity(arguments: argparse.Namespace) -> None:
    import torch

    from quasar_lab.benchmark import quantize_for_benchmark
    from quasar_lab.loading import DEFAULT_MODEL, load
    from quasar_lab.perplexity import perplexity, read_text

    text = read_text(arguments.file)
    model = load(arguments.model or DEFAULT_MODEL)
    ids = torch.tensor(model.tokenizer(text)["input_ids"])
    full = perplexity(model.model, ids, window=arguments.window)
    int8 = perplexity(quantize_for_benchmark(model), ids, window=arguments.window)
    if arguments.json:
        result = {"full": full.perplexity, "int8": int8.perplexity, "tokens": full.tokens}
        print(json.dumps(result))
        return
    ratio = int8.perplexity / full.perplexity - 1
    print(
        f"full precision {full.perplexity:.3f}, INT8 {int8.perplexity:.3f} ({ratio:+.2%}), "
        f"{full.tokens} tokens of {arguments.file}"
    )

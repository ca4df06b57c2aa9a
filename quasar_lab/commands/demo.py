"""`quasar-lab demo`: the main job, with its table and report."""

import argparse
import json
from pathlib import Path
from typing import Any

from quasar_lab.commands.arguments import names, ngram_range


def add(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="measure Quasar against its baselines on this machine",
        description="Calibrate and quantise a model, run {full precision, INT8} x {plain, n-gram "
        "speculative} over the built-in prompts, print the table and write a report.",
    )
    demo.add_argument(
        "--model", help="a preset, a Hub id or a local folder (default: smollm2-135m)"
    )
    demo.add_argument(
        "--tasks",
        type=names,
        help="comma-separated, of mt_bench, humaneval, gsm8k, alpaca, cnn_dm (default: all)",
    )
    demo.add_argument("--limit", type=int, help="prompts a task (default: 2)")
    demo.add_argument("--max-new-tokens", type=int, help="tokens a generation (default: 96)")
    demo.add_argument("--draft-tokens", type=int, default=5, help="tokens a draft (default: 5)")
    demo.add_argument("--ngram", type=ngram_range, default=(1, 3), metavar="MIN:MAX",
                      help="lengths of the n-grams looked up (default: 1:3)")  # fmt: skip
    demo.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    demo.add_argument("--seed", type=int, default=0, help="of sampled runs (default: 0)")
    demo.add_argument("--quick", action="store_true", help="shorter texts: about a minute")
    demo.add_argument("--output", type=Path, default=Path("reports"), metavar="FOLDER",
                      help="where demo.html and demo.json go (default: reports)")  # fmt: skip
    demo.add_argument("--json", action="store_true", help="print JSON instead of the table")
    demo.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from quasar_lab.demo import run_demo
    from quasar_lab.demo_result import QUICK, DemoSettings
    from quasar_lab.methods import DraftSettings

    chosen: dict[str, Any] = dict(QUICK) if arguments.quick else {}
    for setting in ("model", "tasks", "limit", "max_new_tokens"):
        if getattr(arguments, setting) is not None:
            chosen[setting] = getattr(arguments, setting)
    low, high = arguments.ngram
    settings = DemoSettings(
        **chosen,
        draft=DraftSettings(arguments.draft_tokens, max_ngram=high, min_ngram=low),
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    result = run_demo(settings, arguments.output)
    if arguments.json:
        print(json.dumps(result.as_json()))
        return
    print(result.table().to_string())
    print(f"\n{result.verdict}\n\nreport: {arguments.output / 'demo.html'}")

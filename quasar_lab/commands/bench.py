"""`quasar-lab bench`: the paper's experiments on any model, resumable, sharded, merged."""

import argparse
import json
from pathlib import Path
from typing import Any

from quasar_lab.commands.arguments import named_path, names, ngram_range
from quasar_lab.commands.bench_endpoint import run_endpoint


def add(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="the paper's experiments: models x methods x tasks x temperatures x seeds",
        description="Run every method on every prompt at every temperature. Each result is on the "
        "disk before the next run begins: the same command continues a run that was stopped.",
        epilog="quasar-lab bench merge joins the shards of a run; quasar-lab bench tables writes "
        "the paper's tables of a results file.",
    )
    bench.set_defaults(run=run)
    bench.add_argument("--models", type=names, metavar="NAMES",
                       help="presets, Hub ids or folders (default: smollm2-135m)")  # fmt: skip
    bench.add_argument("--methods", type=names, metavar="NAMES",
                       help="default: plain,ngram,int8,quasar; plain always runs; others: suffix, "
                       "layer_skip, adaptive, lossless; int8_head and quasar_head; bf16, "
                       "ngram_bf16, int8_bf16, quasar_bf16; pruned_verifier_90, _75, _50, "
                       "pruned_drafter_90, _75, _50")  # fmt: skip
    bench.add_argument("--tasks", type=names, metavar="NAMES",
                       help="of mt_bench, humaneval, gsm8k, alpaca, cnn_dm "
                       "(default: all)")  # fmt: skip
    bench.add_argument("--questions", type=named_path, action="append", default=[],
                       metavar="NAME=FILE", help="a further task from a question.jsonl; may be "
                       "given several times")  # fmt: skip
    bench.add_argument("--temperatures", type=_floats, metavar="NUMBERS",
                       help="0 is greedy (default: 0,0.2,0.4,0.6,0.8,1)")  # fmt: skip
    bench.add_argument("--seeds", type=_integers, metavar="NUMBERS",
                       help="of sampled runs, each runs (default: 0)")  # fmt: skip
    bench.add_argument("--limit", type=int, help="prompts a task (default: all)")
    bench.add_argument("--max-new-tokens", type=int, help="tokens a turn (default: 128)")
    bench.add_argument("--draft-tokens", type=_integers, metavar="NUMBERS",
                       help="tokens a draft; several make an ablation (default: 5)")  # fmt: skip
    bench.add_argument("--ngram", type=_ngrams, metavar="MIN:MAX",
                       help="lengths of the n-grams looked up, comma-separated for an ablation "
                       "(default: 1:3)")  # fmt: skip
    bench.add_argument("--engine", help="auto, decoder or transformers (default: auto)")
    bench.add_argument("--shard", metavar="I/N",
                       help="run part I of N only, on this machine or GPU")  # fmt: skip
    bench.add_argument("--endpoint", metavar="URL",
                       help="ask an OpenAI-compatible server, run no model")  # fmt: skip
    bench.add_argument("--concurrency", type=_integers, metavar="NUMBERS",
                       help="requests to an endpoint at a time, one level after the other "
                       "(default: 1)")  # fmt: skip
    bench.add_argument("--label",
                       help="what the endpoint's rows are called (default: endpoint)")  # fmt: skip
    bench.add_argument("--output", type=Path, metavar="FILE",
                       help="the results file (default: reports/bench.jsonl, with --shard "
                       "reports/bench-I-of-N.jsonl, with --endpoint reports/endpoint.jsonl)",
                       )  # fmt: skip
    bench.add_argument("--json", action="store_true", help="print JSON instead of the table")

    actions = bench.add_subparsers(metavar="ACTION", required=False, title="with a finished run")
    merge = actions.add_parser("merge", help="join the results of all shards of a run")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE", help="one for each shard")
    merge.add_argument("--output", dest="merged", type=Path, default=Path("reports/bench.jsonl"),
                       metavar="FILE", help="default: reports/bench.jsonl")  # fmt: skip
    merge.set_defaults(run=run_merge)
    tables = actions.add_parser("tables", help="the paper's tables and figures of a results file")
    tables.add_argument("file", type=Path, metavar="FILE", help="what a run or a merge wrote")
    tables.add_argument("--output", dest="folder", type=Path, default=Path("reports"),
                        metavar="FOLDER", help="for Markdown, LaTeX, JSON and figures (default: "
                        "reports)")  # fmt: skip
    tables.set_defaults(run=run_tables)


def run(arguments: argparse.Namespace) -> None:
    if arguments.endpoint is not None:
        run_endpoint(arguments)
        return
    from quasar_lab.errors import UserError
    from quasar_lab.experiment import ExperimentSettings, Shard, run_experiment
    from quasar_lab.methods import DraftSettings
    from quasar_lab.tables import by_task, measured_table

    for option in ("concurrency", "label"):
        if getattr(arguments, option) is not None:
            raise UserError(f"--{option} is for --endpoint, not for runs on this machine")
    chosen: dict[str, Any] = {}
    for setting in ("models", "methods", "tasks", "temperatures", "seeds", "limit",
                    "max_new_tokens", "engine"):  # fmt: skip
        if getattr(arguments, setting) is not None:
            chosen[setting] = getattr(arguments, setting)
    drafts = tuple(
        DraftSettings(count, max_ngram=high, min_ngram=low)
        for count in _or_default(arguments.draft_tokens, 5)
        for low, high in _or_default(arguments.ngram, (1, 3))
    )
    shard = Shard.parse(arguments.shard) if arguments.shard else Shard()
    output = arguments.output
    if output is None:
        part = f"-{shard.index}-of-{shard.count}" if arguments.shard else ""
        output = Path("reports") / f"bench{part}.jsonl"
    settings = ExperimentSettings(
        **chosen, questions=dict(arguments.questions), drafts=drafts, shard=shard
    )
    rows = run_experiment(settings, output)
    measured = measured_table(rows)
    if arguments.json:
        table = json.loads(measured.to_json(orient="records"))
        print(json.dumps({"results": str(output), "rows": len(rows), "table": table}))
        return
    print(f"{by_task(measured).to_string()}\n\n{len(rows)} runs: {output}")


def run_tables(arguments: argparse.Namespace) -> None:
    from quasar_lab.experiment import frame
    from quasar_lab.results import read_results
    from quasar_lab.table_files import write_tables

    _, rows = read_results(arguments.file)
    paths = write_tables(frame(rows), arguments.folder, arguments.file.stem)
    print(
        json.dumps([str(path) for path in paths]) if arguments.json else "\n".join(map(str, paths))
    )


def run_merge(arguments: argparse.Namespace) -> None:
    from quasar_lab.merging import merge_results

    count = merge_results(arguments.files, arguments.merged)
    result = {"results": str(arguments.merged), "rows": count}
    print(json.dumps(result) if arguments.json else f"{count} runs: {arguments.merged}")


def _or_default(values: tuple[Any, ...] | None, default: Any) -> tuple[Any, ...]:
    return (default,) if values is None else values


def _floats(text: str) -> tuple[float, ...]:
    return tuple(_number(part, float) for part in names(text))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_number(part, int) for part in names(text))


def _number(text: str, kind: Any) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = "whole numbers" if kind is int else "numbers"
        raise argparse.ArgumentTypeError(f"{text!r}: give {wanted}, comma-separated") from None


def _ngrams(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(ngram_range(part) for part in names(text))

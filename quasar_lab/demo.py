"""The main job: Quasar on a real model, measured on this machine against its own baselines."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from quasar_lab.benchmark import quantize_for_benchmark, run_benchmark
from quasar_lab.demo_result import DemoResult, DemoSettings
from quasar_lab.errors import UserError
from quasar_lab.fidelity import compare_logits
from quasar_lab.loading import LanguageModel, load
from quasar_lab.machine import describe_machine
from quasar_lab.progress import ProgressBar, say
from quasar_lab.report import demo_page
from quasar_lab.results import write_atomically
from quasar_lab.summary import summarize, verdict
from quasar_lab.tasks import conversation, load_task


def measure_fidelity(
    model: LanguageModel,
    quantized: Any,
    rows: pd.DataFrame,
    progress_label: str = "comparing logits",
) -> pd.DataFrame:
    """INT8 against full precision on the baseline's own text: `compare_logits` of every token."""
    baseline = rows[rows["method"] == "plain"]
    prompts = {
        (task, prompt.question_id): prompt
        for task in dict.fromkeys(baseline["task"])
        for prompt in load_task(task)
    }
    answers: dict[tuple[Any, ...], list[str]] = {}
    tables = []
    with ProgressBar(len(baseline), progress_label, unit="text") as bar, torch.no_grad():
        for row in baseline.itertuples():
            earlier = answers.setdefault((row.task, row.question_id, row.temperature, row.seed), [])
            prompt = prompts[row.task, row.question_id]
            head = model.encode_chat(conversation(prompt, earlier))
            ids = torch.cat([head, torch.tensor(row.tokens, device=head.device)])[None, :-1]
            keep = len(row.tokens)
            logits = [m(ids, logits_to_keep=keep).logits[0] for m in (model.model, quantized)]
            tables.append(compare_logits(*logits).assign(task=row.task))
            earlier.append(model.decode(row.tokens))
            bar.step(row.task)
    return pd.concat(tables, ignore_index=True)


def run_demo(settings: DemoSettings, output: Path | None = Path("reports")) -> DemoResult:
    """Load, quantise, measure, compare; write demo.html and demo.json into `output`."""
    start = time.perf_counter()
    if output is not None:
        _check_writable(output)
    model = load(settings.model)
    say(f"calibrating and quantising {model.name}")
    quantized = quantize_for_benchmark(model)
    rows = run_benchmark(
        model,
        tasks=settings.tasks,
        temperatures=(settings.temperature,),
        seeds=(settings.seed,),
        limit=settings.limit,
        max_new_tokens=settings.max_new_tokens,
        draft=settings.draft,
        quantized=quantized,
    )
    summary = summarize(rows)
    result = DemoResult(
        settings=settings,
        machine=describe_machine(),
        rows=rows,
        summary=summary,
        fidelity=measure_fidelity(model, quantized, rows),
        verdict=verdict(summary),
        seconds=time.perf_counter() - start,
    )
    if output is not None:
        write_atomically(output / "demo.json", json.dumps(result.as_json(), indent=1))
        write_atomically(output / "demo.html", demo_page(result))
    return result


def _check_writable(folder: Path) -> None:
    """Before minutes of measuring, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"cannot write reports to {folder}: {error.strerror}") from error

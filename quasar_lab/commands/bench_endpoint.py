"""`quasar-lab bench --endpoint URL`: the same prompts against a server."""

import argparse
import json
from pathlib import Path
from typing import Any

_LOCAL = ("methods", "draft_tokens", "ngram", "engine", "shard")


def run_endpoint(arguments: argparse.Namespace) -> None:
    from quasar_lab.endpoint import Endpoint
    from quasar_lab.endpoint_benchmark import run_endpoint_benchmark
    from quasar_lab.errors import UserError
    from quasar_lab.tasks import TASKS, load_task

    for option in _LOCAL:
        if getattr(arguments, option) is not None:
            name = option.replace("_", "-")
            raise UserError(f"--{name} is for runs on this machine, not for --endpoint")
    models = arguments.models or (None,)
    if len(models) > 1:
        raise UserError("--models: name one model of the endpoint (default: the first it lists)")
    prompts = {task: load_task(task, arguments.limit) for task in arguments.tasks or TASKS}
    for task, path in arguments.questions:
        prompts[task] = load_task(task, arguments.limit, path)
    chosen: dict[str, Any] = {}
    for setting in ("seeds", "max_new_tokens"):
        if getattr(arguments, setting) is not None:
            chosen[setting] = getattr(arguments, setting)
    output = arguments.output or Path("reports") / "endpoint.jsonl"
    run = run_endpoint_benchmark(
        Endpoint(arguments.endpoint, models[0]),
        prompts,
        arguments.temperatures or (0.0,),
        **chosen,
        limit=None,
        concurrency=(1,) if arguments.concurrency is None else arguments.concurrency,
        method=arguments.label or "endpoint",
        results=output,
    )
    errors = run.rows.loc[run.rows["error"] != "", "error"].value_counts()
    if errors.sum() == len(run.rows):
        raise UserError(f"none of {errors.sum()} requests was answered: {errors.index[0]}")
    table = run.table()
    if arguments.json:
        records = json.loads(table.to_json(orient="records"))
        print(json.dumps({"results": str(output), "rows": len(run.rows), "table": records}))
        return
    print(f"{table.T.to_string(header=False, float_format='{:.3g}'.format)}")
    for error, count in errors.items():
        print(f"{count} x {error}")
    print(f"\n{len(run.rows)} requests: {output}")

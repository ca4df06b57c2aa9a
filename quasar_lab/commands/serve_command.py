"""`quasar-lab serve-command`: what to type to serve a checkpoint with vLLM."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quasar_lab.commands.arguments import ngram_range


def add(commands: Any) -> None:
    serve = commands.add_parser(
        "serve-command",
        help="print the vLLM command that serves a checkpoint speculatively",
        description="Print the command, and as comments what it does differently from the lab. "
        "Nothing is started.",
    )
    serve.add_argument("folder", type=Path, help="what `quasar-lab export` wrote")
    serve.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    serve.add_argument("--drafter", default="ngram",
                       help="ngram, suffix or none (default: ngram)")  # fmt: skip
    serve.add_argument("--draft-tokens", type=int, help="tokens a draft (default: 5)")
    serve.add_argument("--ngram", type=ngram_range, metavar="MIN:MAX",
                       help="lengths of the n-grams looked up (default: 1:3)")  # fmt: skip
    serve.add_argument("--gpus", type=int, default=1, help="of each node (default: 1)")
    serve.add_argument("--nodes", type=int, default=1, help="default: 1")
    serve.add_argument("--backend", default="mp", help="of several nodes: mp or ray (default: mp)")
    serve.add_argument("--head-address", default="HEAD", help="the first node's, for the others")
    serve.add_argument("--port", type=int, default=8000, help="on 127.0.0.1 (default: 8000)")
    serve.add_argument("--max-model-len", type=int, help="tokens of context (default: the model's)")
    serve.add_argument("--json", action="store_true", help="print JSON instead of shell text")
    serve.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from quasar_lab.drafting import NGramDrafter, SuffixDrafter
    from quasar_lab.errors import UserError
    from quasar_lab.serving import vllm_command

    low, high = arguments.ngram or (1, 3)
    count = 5 if arguments.draft_tokens is None else arguments.draft_tokens
    # "first" is vLLM's rule, so that nothing is left to note
    drafters = {
        "ngram": lambda: NGramDrafter(high, low, count, match="first"),
        "suffix": lambda: SuffixDrafter(count),
        "none": lambda: None,
    }
    if arguments.drafter not in drafters:
        raise UserError(f"drafter is {arguments.drafter!r}: choose from {', '.join(drafters)}")
    if arguments.ngram and arguments.drafter != "ngram":
        raise UserError(f"--ngram is for --drafter ngram, not for {arguments.drafter}")
    if arguments.draft_tokens is not None and arguments.drafter == "none":
        raise UserError("--draft-tokens is for a drafter, and --drafter is none")
    command = vllm_command(
        arguments.folder,
        drafters[arguments.drafter](),
        device=arguments.device,
        num_gpus=arguments.gpus,
        num_nodes=arguments.nodes,
        backend=arguments.backend,
        head_address=arguments.head_address,
        port=arguments.port,
        max_model_len=arguments.max_model_len,
    )
    print(json.dumps(asdict(command)) if arguments.json else command)

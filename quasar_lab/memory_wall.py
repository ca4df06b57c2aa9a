"""What a decode step must read from memory, and how long steps of 1, 2, 3 ... tokens really take.

To make one token a model reads every weight once; to check six drafted ones it reads them once as
well. As long as memory is the limit, a step costs bytes / bandwidth whatever its tokens
(algorithms: section 9).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import nn

from quasar_lab.checks import check_prompt
from quasar_lab.errors import UserError
from quasar_lab.quantization import W8A8Linear
from quasar_lab.targets import Target
from quasar_lab.timing import time_interleaved


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one step reads: rounded weights with their scales, other weights, KV cache."""

    quantized: int
    high_precision: int
    kv_cache: int

    @property
    def total(self) -> int:
        return self.quantized + self.high_precision + self.kv_cache


def bytes_per_step(model: Any, context: int = 0) -> StepBytes:
    """Count the bytes of a Hugging Face model, in full precision or with W8A8 linears.

    An embedding counts nothing, as a step looks up a few rows of it; where it is tied to the output
    layer, it is read there in full. context: tokens in the KV cache.
    """
    if context < 0:
        raise UserError(f"context is {context}: it must be 0 tokens or more")
    quantized = high = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in own)
        if isinstance(module, W8A8Linear):
            quantized += size
        else:
            high += size
    return StepBytes(quantized, high, context * _kv_bytes_per_token(model))


def _kv_bytes_per_token(model: Any) -> int:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize


def time_steps(
    targets: Mapping[str, Target],
    prompt_ids: object,
    token_counts: Iterable[int] = range(1, 9),
    *,
    repeats: int = 7,
) -> pd.DataFrame:
    """Time a step of M tokens after the prompt for each target and M, all taking turns.

    Returns columns target, tokens (M), and in seconds: median, low (10 %), high (90 %). The targets
    hold the prompt afterwards. Raises UserError for a count below 1 or no repeats.
    """
    counts = list(token_counts)
    if not counts or min(counts) < 1 or repeats < 1:
        raise UserError(
            f"token_counts is {counts} and repeats {repeats}: steps have at least one token and "
            "are timed at least once"
        )
    prompt = check_prompt(prompt_ids, None)
    for target in targets.values():
        target.rollback(target.length)
        target.forward(torch.tensor(prompt))

    def step(target: Target, tokens: int) -> Any:
        ids = torch.tensor([prompt[i % len(prompt)] for i in range(tokens)])

        def run(_: int) -> None:
            target.forward(ids)
            target.rollback(tokens)

        return run

    cells = {(name, count): step(targets[name], count) for count in counts for name in targets}
    names = {f"{name}, {count}": (name, count) for name, count in cells}
    times = time_interleaved(
        {label: cells[cell] for label, cell in names.items()}, repeats=repeats, warm_up=1
    )
    index = pd.DataFrame.from_dict(names, orient="index", columns=["target", "tokens"])
    return index.join(times[["median", "low", "high"]]).reset_index(drop=True)

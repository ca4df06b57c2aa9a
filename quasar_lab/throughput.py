"""Every method of the lab beside what people use today, in one run on the same weights.

`run_benchmark` does the measuring; here are the peers around it, the table, and the check of the
texts: a method must write what its own target writes plainly, token for token.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from quasar_lab.engines import LEAN
from quasar_lab.errors import UserError
from quasar_lab.loading import LanguageModel
from quasar_lab.methods import BASELINE, FULL, METHODS, DraftSettings
from quasar_lab.peers import PeerProcess, UnavailableError, checked_peers
from quasar_lab.peers.gguf_file import write_q8_0
from quasar_lab.progress import say
from quasar_lab.summary import common_prefix, label_of

# What is compared: (method, over the fastest of these, what the engine is built to reach or None).
COMPARISONS = (
    ("quasar", ("transformers",), 8.0),
    ("quasar", ("llama_cpp", "llama_cpp_lookup"), 1.2),
    ("int8", ("llama_cpp",), None),
    ("quasar", ("ngram",), 2.0),
    ("quasar_bf16", ("ngram",), 2.0),
    ("quasar_head", ("ngram",), 2.0),
    ("ngram_bf16", ("ngram",), None),
    ("quasar_bf16", ("ngram_bf16",), None),
)


@contextmanager
def running_peers(
    names: Iterable[str],
    model: LanguageModel,
    draft: DraftSettings,
    *,
    max_length: int = 2048,
    vllm_python: str | None = None,
) -> Iterator[tuple[list[PeerProcess], dict[str, str]]]:
    """(peers at work, name -> why the others are not), until the `with` block ends.

    model: what `load` gave for a preset, a Hub id or a folder. max_length: tokens of prompt and
    answer. vllm_python: an interpreter that has vLLM. Raises UserError for an unknown name.
    """
    wanted = checked_peers(names)
    running: list[PeerProcess] = []
    skipped: dict[str, str] = {}
    eos = model.model.generation_config.eos_token_id
    setup: dict[str, Any] = {
        "model": model.model.name_or_path,  # the folder that it was loaded from
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "draft_tokens": draft.num_draft_tokens,
        "max_ngram": draft.max_ngram,
        "max_length": max_length,
        "eos": [eos] if isinstance(eos, int) else list(eos or ()),
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for peer in wanted:
            say(f"starting {peer.label}")
            options = {"python": vllm_python} if peer.backend == "vllm" and vllm_python else {}
            try:
                if peer.backend == "llama_cpp":
                    setup["gguf"] = str(_gguf(model, folder / "model-q8_0.gguf"))
                running.append(stack.enter_context(PeerProcess(peer, setup, **options)))
            except (UnavailableError, UserError) as reason:
                skipped[peer.name] = str(reason)
        yield running, skipped


def _gguf(model: LanguageModel, path: Path) -> Path:
    if not path.exists():
        write_q8_0(model.model, path)
    return path


def throughput_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a method or peer, from the rows of `run_benchmark`, fastest first.

    Columns: label; tokens_per_second: the median over generations of each kind of task, and of
    these the median over the kinds; low, high: the slowest and the fastest kind;
    answer_seconds: prompt and answer together, median; L; times_baseline; pooled: all tokens over
    all seconds.
    """
    by_task = rows.groupby(["method", "task"])["tokens_per_second"].median().unstack()
    whole = (rows["prefill_seconds"] + rows["decode_seconds"]).groupby(rows["method"]).median()
    totals = rows.groupby("method")[["new_tokens", "steps", "decode_seconds"]].sum()
    speed = by_task.median(axis=1)
    return pd.DataFrame(
        {
            "label": [label_of(name) for name in speed.index],
            "tokens_per_second": speed,
            "low": by_task.min(axis=1),
            "high": by_task.max(axis=1),
            "answer_seconds": whole,
            "L": totals["new_tokens"] / totals["steps"].where(totals["steps"] > 0),
            "times_baseline": speed / speed[BASELINE],
            "pooled": totals["new_tokens"] / totals["decode_seconds"],
        }
    ).sort_values("tokens_per_second", ascending=False)


def text_check(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a method: the method whose text it must write, or for a peer: the plain one's.

    Columns: reference; same: generations that are token for token the reference's; of: all of them;
    prefix: the share of the reference's tokens before the first difference; must: of all of them
    the lean decoder is the engine, where a token's logits do not depend on those beside it. In
    transformers the last bits do, so that in bfloat16 above all a text may change at a near-tie.
    Peers round otherwise as well.
    """
    keys = ["task", "question_id", "turn"]
    texts = {name: group.set_index(keys)["tokens"] for name, group in rows.groupby("method")}
    found = {}
    for name, own in texts.items():
        method = METHODS.get(str(name))
        reference = BASELINE
        if method is not None and FULL not in (method.precision, method.confirm):
            reference = method.precision  # but for FULL, each has a plain method of its name
        if reference not in texts:
            continue
        pairs = [(own[key], texts[reference][key]) for key in own.index]
        found[name] = {
            "reference": reference,
            "same": sum(a == b for a, b in pairs),
            "of": len(pairs),
            "prefix": sum(common_prefix(a, b) for a, b in pairs) / sum(len(b) for _, b in pairs),
            "must": bool((rows.loc[rows["method"] == name, "engine"] == LEAN).all()),
        }
    return pd.DataFrame.from_dict(found, orient="index")


def comparisons(table: pd.DataFrame) -> list[str]:
    """A line for each of `COMPARISONS`, from `throughput_table`.

    The ratio of the table's speeds, and that of all tokens over all seconds with its two terms,
    tokens a step and time of a step; then what was aimed at.
    """
    lines = []
    for method, others, factor in COMPARISONS:
        there = [name for name in others if name in table.index]
        if method not in table.index or not there:
            lines.append(f"{label_of(method)} over {label_of(others[0])}: not measured")
            continue
        best = max(there, key=lambda name: table.loc[name, "tokens_per_second"])
        columns = ["tokens_per_second", "pooled", "L"]
        ratio, pooled, length = (table.loc[method, columns] / table.loc[best, columns]).astype(
            float
        )
        line = f"{label_of(method)} over {label_of(best)}: {ratio:.2f}x; in all {pooled:.2f}x"
        if not math.isnan(length):
            line += f" = L {length:.2f} x step {pooled / length:.2f}"
        if factor is not None:
            verdict = "reached" if ratio >= factor else "missed"
            line += f"; at least {factor:g}x wanted: {verdict}"
        lines.append(line)
    return lines

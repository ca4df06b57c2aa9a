"""Watch a model read a few prompts: the per-channel statistics that smoothing needs.

A handful of input channels of an LLM's linears are tens to thousands of times larger than the
rest. A token is rounded with *one* scale, so these channels decide the step for all the others.
`calibrate` runs the prompts through the model and records, for the input of every linear, the
range of each channel and how far the bulk of the values spreads.

Statistics are updated as the tokens stream by: memory is O(channels) for each distinct input,
plus two samples of at most a few hundred rows. Linears that read the same tensor (q, k and v; gate
and up) share one `ActivationStats`.
"""

import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quasar_lab.activation_stats import Accumulator, ActivationStats
from quasar_lab.errors import UserError
from quasar_lab.structure import as_module, describe, weight_modules
from quasar_lab.token_batches import unpadded

__all__ = ["ActivationStats", "CalibrationStats", "Observer", "calibrate", "observe"]

# The m2 search multiplies the sample by the weights up to 100 times, and its attention loss is
# quadratic in the sample: a few hundred tokens are what it can use.
MAX_SAMPLE_TOKENS = 256

# The calibration text is kept (as token ids) up to here, to measure a quantised model on.
MAX_RECORDED_TOKENS = 4096


_FORMAT = "quasar-lab calibration 2"
_TENSORS = ("min", "max", "sigma", "sample", "spread_sample")


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationStats(Mapping[str, ActivationStats]):
    """Module name of a linear -> `ActivationStats` of its input, and where they come from.

    model_name: the model's name or path; num_batches, num_tokens: how much text was read;
    sequences: its first tokens (up to 4,096), each int64[S], for measuring quantised models on.
    Linears that read the same tensor map to the same object.
    """

    stats: dict[str, ActivationStats]
    model_name: str = ""
    num_batches: int = 0
    num_tokens: int = 0
    sequences: tuple[Int64[Tensor, "_"], ...] = ()

    def __getitem__(self, name: str) -> ActivationStats:
        return self.stats[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stats)

    def __len__(self) -> int:
        return len(self.stats)

    @property
    def amount(self) -> str:
        """How much text was read, in words."""
        return f"{self.num_batches} batches, {self.num_tokens} tokens"

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; shared statistics are stored once.

        The file appears under its name only when it is complete. UserError if it cannot.
        """
        path = Path(path)
        distinct = list({id(stats): stats for stats in self.stats.values()}.values())
        index = {id(stats): i for i, stats in enumerate(distinct)}
        tensors = {
            f"{i}.{field}": getattr(stats, field).cpu().contiguous()
            for i, stats in enumerate(distinct)
            for field in _TENSORS
        }
        tensors |= {f"sequence.{i}": ids for i, ids in enumerate(self.sequences)}
        metadata = {
            "format": _FORMAT,
            "model_name": self.model_name,
            "num_batches": str(self.num_batches),
            "num_tokens": str(self.num_tokens),
            "group_of_linear": json.dumps({n: index[id(s)] for n, s in self.stats.items()}),
            "group_tokens": json.dumps([stats.num_tokens for stats in distinct]),
        }
        unfinished = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, unfinished, metadata)
            unfinished.replace(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot write {path}: {error}") from error
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> "CalibrationStats":
        """Read what `save` wrote. UserError when there is no such file, or another one there."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read calibration statistics from {path}: {error}") from None
        if metadata.get("format") != _FORMAT:
            raise UserError(
                f"{path} holds no calibration statistics, or some of another version: calibrate "
                "and save again"
            )
        num_sequences = sum(name.startswith("sequence.") for name in tensors)
        try:
            groups = [
                ActivationStats(**{f: tensors[f"{i}.{f}"] for f in _TENSORS}, num_tokens=count)
                for i, count in enumerate(json.loads(metadata["group_tokens"]))
            ]
            names = json.loads(metadata["group_of_linear"])
            return cls(
                {name: groups[i] for name, i in names.items()},
                metadata["model_name"],
                int(metadata["num_batches"]),
                int(metadata["num_tokens"]),
                tuple(tensors[f"sequence.{i}"] for i in range(num_sequences)),
            )
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} lacks a part of what `save` writes ({error}): calibrate and save again"
            ) from error

    def __repr__(self) -> str:
        name = self.model_name or "a model"
        if Path(name).is_absolute():  # where a folder lies is nobody else's business
            name = Path(name).name
        return f"CalibrationStats({len(self.stats)} linears of {name}, {self.amount})"


class Observer:
    """Collects the statistics of every linear's input while `observe` is in force."""

    def __init__(self, max_sample_tokens: int | None) -> None:
        self.max_sample_tokens = max_sample_tokens
        self.accumulators: dict[str, Accumulator] = {}
        self._batch = -1
        self._seen: list[tuple[weakref.ref[Tensor], int, Accumulator]] = []

    def start_batch(self) -> None:
        """Call before each forward: errors name the batch by the number of calls."""
        self._batch += 1
        self._seen.clear()

    def record(self, name: str, x: Tensor) -> None:
        """Take the input x[..., C] of the linear `name` into account."""
        for reference, version, accumulator in reversed(self._seen):
            if reference() is x and version == x._version:
                if self.accumulators.setdefault(name, accumulator) is accumulator:
                    return  # another linear has recorded this very tensor
                break
        accumulator = self.accumulators.setdefault(name, Accumulator(self.max_sample_tokens))
        accumulator.update(x.detach(), where=f"{name}, batch {self._batch}")
        self._seen.append((weakref.ref(x), x._version, accumulator))

    def results(self) -> dict[str, ActivationStats]:
        """The statistics so far; linears that share an input share the object."""
        finished: dict[int, ActivationStats] = {}
        for accumulator in self.accumulators.values():
            if id(accumulator) not in finished:
                finished[id(accumulator)] = accumulator.result()
        return {name: finished[id(acc)] for name, acc in self.accumulators.items()}


@contextmanager
def observe(
    model: nn.Module,
    names: Iterable[str] | None = None,
    *,
    max_sample_tokens: int | None = MAX_SAMPLE_TOKENS,
) -> Iterator[Observer]:
    """Record the inputs of the linears `names` (default: all) of every forward in the block.

    The hooks are gone when the block ends, by an exception too.
    """
    observer = Observer(max_sample_tokens)
    modules = weight_modules(model)
    handles = []

    def watch(name: str) -> None:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            observer.record(name, x)

        handles.append(modules[name].register_forward_pre_hook(hook, with_kwargs=True))

    try:
        for name in modules if names is None else names:
            if name not in modules:
                raise UserError(f"no linear named {name!r} in this model")
            watch(name)
        yield observer
    finally:
        for handle in handles:
            handle.remove()


def calibrate(
    model: object,
    batches: Any,
    *,
    max_sample_tokens: int | None = MAX_SAMPLE_TOKENS,
    ignore: Sequence[str] | str = (),
) -> CalibrationStats:
    """Run `batches` through `model` and return the statistics of every linear's input.

    model: any Hugging Face causal language model, or what `load` returned.
    batches: token ids as LongTensor[S] or LongTensor[B, S], a dict with "input_ids" and perhaps
        "attention_mask" (what a tokenizer returns), or a pair (ids, mask). Padding is cut out, not
        just ignored: each sequence of a padded batch is run alone, so positions, statistics and
        sample are exactly those of the unpadded text.
    max_sample_tokens: rows of the first batch that are kept as the sample X0 (None: all).
    ignore: name patterns (fnmatch) of linears that need not run, e.g. rarely chosen experts.

    The model is unchanged. Raises UserError for an empty calibration set, a batch of the wrong
    type or rank, a linear that never ran, and NaN or Inf (naming linear and batch).
    """
    model = as_module(model)
    if isinstance(batches, Mapping | str) or not isinstance(batches, Iterable):
        raise UserError(
            f"batches is {describe(batches)}: pass a list of batches, even for a single one"
        )
    ignore = (ignore,) if isinstance(ignore, str) else ignore
    sequences: list[Tensor] = []
    recorded = num_batches = num_tokens = 0
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    try:
        # no_grad, not inference_mode: the observer compares tensor versions
        with (
            torch.no_grad(),
            observe(model, max_sample_tokens=max_sample_tokens) as observer,
            _silent_head(model),
        ):
            for index, batch in enumerate(batches):
                num_batches += 1
                for ids in unpadded(batch, index, model):
                    observer.start_batch()
                    model(input_ids=ids.to(device), use_cache=False)
                    num_tokens += ids.numel()
                    for row in ids:
                        if recorded < MAX_RECORDED_TOKENS:
                            sequences.append(row[: MAX_RECORDED_TOKENS - recorded].cpu().clone())
                            recorded += len(sequences[-1])
    finally:
        model.train(was_training)
    if num_batches == 0:
        raise UserError("the calibration set is empty: pass at least one batch of token ids")
    silent = [
        name
        for name in weight_modules(model)
        if name not in observer.accumulators and not any(fnmatchcase(name, p) for p in ignore)
    ]
    if silent:
        shown = ", ".join(silent[:3]) + (f" and {len(silent) - 3} more" if silent[3:] else "")
        raise UserError(
            f"these linears never ran on {num_tokens} tokens: {shown}; add text or list them in "
            "ignore="
        )
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    return CalibrationStats(observer.results(), name, num_batches, num_tokens, tuple(sequences))


@contextmanager
def _silent_head(model: nn.Module) -> Iterator[None]:
    """The output layer is observed but not computed: nobody reads these logits, and in a small
    model they are a fifth of the work.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or "forward" in head.__dict__:
        yield
        return
    head.__dict__["forward"] = lambda x: x[..., :1]
    try:
        yield
    finally:
        del head.__dict__["forward"]

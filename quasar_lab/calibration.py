"""Watch a model read a few prompts: the per-channel statistics that smoothing needs.

A handful of input channels of an LLM's linears are tens to thousands of times larger than the
rest. A token is rounded with *one* scale, so these channels decide the step for all the others.
`calibrate` runs the prompts through the model and records, for the input of every linear, the
range of each channel and how far the bulk of the values spreads.

Statistics are updated as the tokens stream by: memory is O(channels) for each distinct input,
plus a sample of the first batch. Linears that read the same tensor (q, k and v; gate and up)
share one `ActivationStats`.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from quasar_lab.errors import UserError
from quasar_lab.structure import weight_modules

# The m2 search multiplies the sample by the weights up to 100 times, and its attention loss is
# quadratic in the sample: a few hundred tokens are what it can use.
MAX_SAMPLE_TOKENS = 256

# The calibration text is kept (as token ids) up to here, to measure a quantised model on.
MAX_RECORDED_TOKENS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class ActivationStats:
    """What is known of the C channels of one linear's input x (algorithms: section 1).

    min, max: fp32[C], over all tokens; sigma: fp32 scalar, the largest over batches of the
    unbiased standard deviation of x - center (all tokens and channels of the batch together, the
    center being that of the tokens seen so far); sample: the inputs X0[N0, C] of the first batch;
    num_tokens: how many rows were seen.
    """

    min: Float32[Tensor, "C"]
    max: Float32[Tensor, "C"]
    sigma: Float32[Tensor, ""]
    sample: Float32[Tensor, "N0 C"]
    num_tokens: int

    @property
    def absmax(self) -> Float32[Tensor, "C"]:
        """a_j = max |x_j|."""
        return torch.maximum(self.min.abs(), self.max.abs())

    @property
    def center(self) -> Float32[Tensor, "C"]:
        """m_j = (max_j + min_j) / 2."""
        return (self.max + self.min) / 2

    @property
    def center_absmax(self) -> Float32[Tensor, "C"]:
        """c_j = max (x_j - m_j), half the range of the channel."""
        return (self.max - self.min) / 2

    @property
    def threshold(self) -> Float32[Tensor, ""]:
        """T = max_j c_j."""
        return self.center_absmax.max()

    @property
    def outlier_ratio(self) -> float:
        """The largest channel's absmax over the median channel's: 1 is flat, 100 is an outlier."""
        absmax = self.absmax
        return float(absmax.max() / absmax.median().clamp_min(1e-12))

    @classmethod
    def from_batches(
        cls, batches: Iterable[Tensor] | Tensor, *, max_sample_tokens: int | None = None
    ) -> "ActivationStats":
        """Statistics of `batches`, tensors [..., C] (a bare tensor counts as one batch).

        Raises UserError when there is no batch, a batch is empty or not finite, or C changes.
        """
        accumulator = _Accumulator(max_sample_tokens)
        for index, batch in enumerate([batches] if isinstance(batches, Tensor) else batches):
            if not isinstance(batch, Tensor) or batch.ndim == 0:
                raise UserError(
                    f"batch {index} is {_describe(batch)}: pass tensors [..., channels]"
                )
            accumulator.update(batch.detach(), where=f"batch {index}")
        return accumulator.result()


class _Accumulator:
    """The running form of `ActivationStats`."""

    def __init__(self, max_sample_tokens: int | None) -> None:
        self.max_sample_tokens = max_sample_tokens
        self.num_tokens = 0

    def update(self, x: Float[Tensor, "*rows C"], *, where: str) -> None:
        if x.numel() == 0:
            raise UserError(f"{where}: no tokens in a batch of shape {list(x.shape)}")
        x = x.reshape(-1, x.shape[-1]).float()
        low, high = torch.aminmax(x, dim=0)
        # min and max propagate NaN and Inf, so C values tell about all of them
        if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise UserError(
                f"{where}: NaN or Inf in the input, check the model's weights and dtype"
            )
        if self.num_tokens == 0:
            self.min, self.max = low, high
            self.sigma = torch.zeros((), device=x.device)
            self.sample = x[: self.max_sample_tokens].clone()
        elif len(low) != len(self.min):
            raise UserError(f"{where}: {len(low)} channels, earlier batches had {len(self.min)}")
        else:
            self.min, self.max = torch.minimum(self.min, low), torch.maximum(self.max, high)
        if x.numel() > 1:
            spread = (x - (self.max + self.min) / 2).std()
            self.sigma = torch.maximum(self.sigma, spread)
        self.num_tokens += len(x)

    def result(self) -> ActivationStats:
        if self.num_tokens == 0:
            raise UserError("no batches to take statistics of: pass at least one")
        return ActivationStats(self.min, self.max, self.sigma, self.sample, self.num_tokens)


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

    def __repr__(self) -> str:
        return (
            f"CalibrationStats({len(self.stats)} linears of {self.model_name or 'a model'}, "
            f"{self.num_batches} batches, {self.num_tokens} tokens)"
        )


class Observer:
    """Collects the statistics of every linear's input while `observe` is in force."""

    def __init__(self, max_sample_tokens: int | None) -> None:
        self.max_sample_tokens = max_sample_tokens
        self.accumulators: dict[str, _Accumulator] = {}
        self._batch = -1
        self._seen: list[tuple[weakref.ref[Tensor], int, _Accumulator]] = []

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
        accumulator = self.accumulators.setdefault(name, _Accumulator(self.max_sample_tokens))
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
    model: nn.Module,
    batches: Iterable[object],
    *,
    max_sample_tokens: int | None = MAX_SAMPLE_TOKENS,
    ignore: Sequence[str] = (),
) -> CalibrationStats:
    """Run `batches` through `model` and return the statistics of every linear's input.

    batches: token ids as LongTensor[S] or LongTensor[B, S], a dict with "input_ids" and perhaps
        "attention_mask" (what a tokenizer returns), or a pair (ids, mask). Padding is cut out, not
        just ignored: each sequence of a padded batch is run alone, so positions, statistics and
        sample are exactly those of the unpadded text.
    max_sample_tokens: rows of the first batch that are kept as the sample X0 (None: all).
    ignore: name patterns (fnmatch) of linears that need not run, e.g. rarely chosen experts.

    The model is unchanged. Raises UserError for an empty calibration set, a batch of the wrong
    type or rank, a linear that never ran, and NaN or Inf (naming linear and batch).
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model is {_describe(model)}: pass the torch module, e.g. load().model")
    sequences: list[Tensor] = []
    recorded = num_batches = num_tokens = 0
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    try:
        # no_grad, not inference_mode: the observer compares tensor versions
        with torch.no_grad(), observe(model, max_sample_tokens=max_sample_tokens) as observer:
            for index, batch in enumerate(batches):
                num_batches += 1
                for ids in _unpadded(batch, index, model):
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


def _unpadded(batch: object, index: int, model: nn.Module) -> list[Tensor]:
    """One batch as a list of LongTensor[B, S] without padding."""
    mask: object = None
    if isinstance(batch, Mapping):
        if "input_ids" not in batch:
            raise UserError(f"batch {index} has no 'input_ids', only {sorted(map(str, batch))}")
        ids, mask = batch["input_ids"], batch.get("attention_mask")
    elif isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[0], Tensor):
        ids, mask = batch
    else:
        ids = batch
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(f"batch {index} is {_describe(ids)}: pass token ids as a LongTensor")
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise UserError(
            f"batch {index} has shape {list(ids.shape)}: pass ids [tokens] or [batch, tokens]"
        )
    ids = ids.reshape(-1, ids.shape[-1]).long()
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embedding, "num_embeddings", None)
    if ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary):
        raise UserError(
            f"batch {index} has token id {int(ids.min() if ids.min() < 0 else ids.max())}, the "
            f"model's ids go from 0 to {(vocabulary or 0) - 1}"
        )
    if mask is None:
        rows = [ids]
    else:
        if not isinstance(mask, Tensor) or mask.numel() != ids.numel():
            raise UserError(
                f"batch {index}: the attention mask must be a tensor of shape {list(ids.shape)}"
            )
        keep = mask.reshape(ids.shape).bool()
        rows = (
            [ids] if keep.all() else [row[kept][None] for row, kept in zip(ids, keep, strict=True)]
        )
        if any(row.numel() == 0 for row in rows):
            raise UserError(f"batch {index} has a sequence that is all padding")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit is not None and max(row.shape[-1] for row in rows) > limit:
        raise UserError(
            f"batch {index} has {max(row.shape[-1] for row in rows)} tokens, the model takes "
            f"{limit}"
        )
    return rows


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"

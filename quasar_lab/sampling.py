"""From logits to the probabilities that tokens are drawn from.

Temperature, top-k, top-p, min-p and the repetition penalty apply to every position of a drafted
block, each with the tokens before it in view: otherwise speculative and plain decoding would
draw from different distributions. Probabilities are float64, so that the acceptance rule
(`quasar_lab.verification`, offered here too as `verify`) is exact to rounding.
"""

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from quasar_lab.checks import check_instance, check_integers, check_tokens
from quasar_lab.errors import UserError
from quasar_lab.verification import fresh_generator, verify

__all__ = ["SamplingConfig", "adjusted_logits", "probabilities", "verify"]

# Checked when the configuration is made, with an error for people. numpy's scalars are welcome.
Number = Any
WholeNumber = Any


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How a token is chosen from the logits. Applied in the order of the fields.

    temperature         0 is greedy; otherwise logits / temperature
    top_k               keep the k most likely tokens (ties with the k-th are kept); None: all
    top_p               keep the smallest set of most likely tokens whose mass reaches top_p
    min_p               keep tokens at least min_p times as likely as the most likely one
    repetition_penalty  1 is off; the logit of a token that occurred before is divided by it where
                        positive and multiplied where negative (Keskar et al. 2019, arXiv
                        1909.05858). Applied first. Prompt and drafted tokens count as before.
    seed                of the generator that `generate` draws from; None: another one every time

    Raises UserError for a value outside its range.
    """

    temperature: Number = 0.0
    top_k: WholeNumber | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number = 1.0
    seed: WholeNumber | None = None

    def __post_init__(self) -> None:
        every = "None keeps every token"
        checked = {
            "temperature": _number("temperature", self.temperature, math.inf, "0 is greedy"),
            "top_k": _whole_number("top_k", self.top_k, 1, every),
            "top_p": None if self.top_p is None else _number("top_p", self.top_p, 1.0, every),
            "min_p": None if self.min_p is None else _number("min_p", self.min_p, 1.0, every),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, math.inf, "1 is off"
            ),
            "seed": _whole_number(
                "seed", self.seed, 0, "None draws another one every time", high=2**64 - 1
            ),
        }
        for name in ("top_p", "repetition_penalty"):
            if checked[name] == 0:
                raise UserError(f"{name} is {getattr(self, name)!r}: it must be above 0")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and nothing is drawn."""
        return self.temperature == 0

    def generator(self) -> torch.Generator:
        """A generator of this configuration's own; the global one is never touched."""
        return fresh_generator(self.seed)


def _number(name: str, value: Any, high: float, hint: str) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise UserError(f"{name} is {value!r}: it must be a number ({hint})")
    if not 0 <= float(value) <= high or math.isinf(value):
        allowed = "at least 0" if math.isinf(high) else f"between 0 and {high:g}"
        raise UserError(f"{name} is {value!r}: it must be finite and {allowed} ({hint})")
    return float(value)


def _whole_number(name: str, value: Any, low: int, hint: str, high: float = math.inf) -> int | None:
    if value is None:
        return None
    if (
        not isinstance(value, numbers.Integral)
        or isinstance(value, bool)
        or not low <= int(value) <= high
    ):
        allowed = f">= {low}" if math.isinf(high) else f"from {low} to {high}"
        raise UserError(
            f"{name} is {value!r}: it must be a whole number {allowed}, or None ({hint})"
        )
    return int(value)


def probabilities(
    logits: Any,
    config: Any,
    context: object = None,
    *,
    draft_tokens: object = (),
    first_position: int = 0,
) -> Float64[Tensor, "rows vocab"]:
    """The distributions that tokens are drawn from, one a row.

    Args:
        logits: [R, V], any float dtype. -inf masks a token out; NaN and +inf are errors.
        config: temperature, top-k, top-p, min-p and repetition penalty. Temperature 0 gives
            one-hot rows (the first of equal maxima).
        context: the tokens before row 0 (a list or LongTensor), seen by every row; only the
            repetition penalty reads it.
        draft_tokens: up to R - 1 tokens: row r also sees the first r of them, because that is
            the prefix that row r continues.
        first_position: the position of row 0 in the sequence, for error messages.

    Raises:
        UserError: NaN or +inf in a row, or a row with every token masked; names the position.
    """
    check_instance("config", config, SamplingConfig)
    scores = adjusted_logits(
        logits, config, context, draft_tokens=draft_tokens, first_position=first_position
    )
    if config.greedy:
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(scores, dtype=torch.float64).scatter_(-1, best, 1.0)
    # A softmax in one buffer: at [6, 49152] a new temporary costs more than the arithmetic on it.
    p = scores.to(torch.float64, copy=True)
    p.sub_(p.amax(dim=-1, keepdim=True)).div_(config.temperature).exp_()
    p.div_(p.sum(dim=-1, keepdim=True))
    # Each filter keeps what is at least as likely as the last token it wants: ties stay together,
    # so that the same row gives the same set wherever it stands in a block.
    if config.top_k is not None and config.top_k < p.shape[-1]:
        p.masked_fill_(p < p.topk(config.top_k, dim=-1).values[:, -1:], 0.0)
    if config.top_p is not None and config.top_p < 1:
        p.masked_fill_(p < _nucleus_threshold(p, config.top_p), 0.0)
    if config.min_p is not None:
        p.masked_fill_(p < config.min_p * p.amax(dim=-1, keepdim=True), 0.0)
    if config.top_k is not None or config.top_p is not None or config.min_p is not None:
        p.div_(p.sum(dim=-1, keepdim=True))
    return p


def adjusted_logits(
    logits: Tensor,
    config: SamplingConfig,
    context: object = None,
    *,
    draft_tokens: object = (),
    first_position: int = 0,
) -> Tensor:
    """The checked logits [R, V] after the repetition penalty; their argmax is the greedy token.

    Arguments and errors as in `probabilities`. Without a penalty the input itself is returned.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise UserError(
            f"logits have shape {tuple(logits.shape)} and dtype {logits.dtype}: "
            "they must be floating point [rows, vocabulary]"
        )
    advice = "check the model's weights and quantisation scales, or run it in float32"
    _check_logits(logits, first_position, "output of the model's last layer, lm_head", advice)
    if config.repetition_penalty == 1:
        return logits
    vocab_size = logits.shape[1]
    seen = _distinct_tokens("context", context, vocab_size)
    scores = logits.to(torch.float64, copy=True)
    columns = torch.tensor(sorted(seen), dtype=torch.long, device=logits.device)
    scores[:, columns] = _penalised(scores[:, columns], config)
    for row, token in enumerate(_token_list("draft", draft_tokens, vocab_size), start=1):
        if token not in seen:
            seen.add(token)
            scores[row:, token] = _penalised(scores[row:, token], config)
    where = f"after the repetition penalty of {config.repetition_penalty:g}"
    _check_logits(scores, first_position, where, "choose a penalty closer to 1")
    return scores


def greedy_tokens(scores: Tensor) -> list[int]:
    """The most likely token of each row [R, V], the first of equal ones."""
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        # a sixth of the time of torch's own argmax at [6, 49152]: 2 % of a decoding step
        return scores.detach().numpy().argmax(axis=-1).tolist()
    return scores.argmax(dim=-1).tolist()


def _penalised(scores: Tensor, config: SamplingConfig) -> Tensor:
    penalty = config.repetition_penalty
    return torch.where(scores > 0, scores / penalty, scores * penalty)


def _check_logits(logits: Tensor, first_position: int, origin: str, advice: str) -> None:
    # NaN and +inf survive a maximum, a row of nothing but -inf gives -inf: one cheap look.
    largest = logits.amax(dim=-1).tolist()
    row = next((row for row, value in enumerate(largest) if not math.isfinite(value)), None)
    if row is None:
        return
    value = largest[row]
    what = "only -inf" if value == -math.inf else ("NaN" if math.isnan(value) else "inf")
    tokens = "" if value == -math.inf else f" for token {int(logits[row].argmax())}"
    raise UserError(
        f"the logits ({origin}) hold {what}{tokens} at position {first_position + row} (row {row} "
        f"of {len(logits)}): {advice}"
    )


def _token_list(name: str, tokens: object, vocab_size: int) -> list[int]:
    row = check_integers(f"the {name}", () if tokens is None else tokens).reshape(-1)
    ids: list[int] = row.tolist()
    check_tokens(f"the {name} holds", ids, vocab_size)
    return ids


def _distinct_tokens(name: str, tokens: object, vocab_size: int) -> set[int]:
    if isinstance(tokens, set | frozenset):
        tokens = sorted(tokens)
    return set(_token_list(name, tokens, vocab_size))


def _nucleus_threshold(p: Tensor, top_p: float) -> Tensor:
    """The smallest probability [R, 1] among the most likely tokens whose mass reaches top_p.

    p may be unnormalised (top-k came first). All tokens below (1 - top_p) / V together hold less
    than 1 - top_p, so the others are enough: only they are sorted, some hundreds out of 50,000.
    """
    mass = p.sum(dim=-1, keepdim=True)
    # 1e-12: .5 and .4 reach .9, although the sum of a softmax's float64 values may fall short
    wanted = (top_p - 1e-12) * mass
    candidate = p >= (1 - top_p) / p.shape[-1] * mass
    thresholds = []
    for row, is_candidate, enough in zip(p, candidate, wanted, strict=True):
        largest = row[is_candidate].sort(descending=True).values
        position = torch.searchsorted(largest.cumsum(0), enough)
        thresholds.append(largest[position.clamp(max=len(largest) - 1)])
    return torch.stack(thresholds)

"""Generate text, plainly or speculatively, with the output distribution of the target.

One loop serves both: plain decoding is speculation with empty drafts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quasar_lab.errors import UserError
from quasar_lab.sampling import SamplingConfig
from quasar_lab.sequence import SpeculativeSequence
from quasar_lab.targets import as_target
from quasar_lab.trace import Step, Trace


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens that were generated and how.

    tokens         the new tokens; the prompt is not included, an end-of-sequence token is
    finish_reason  "eos", "length" (max_new_tokens), "stopped" (should_stop), "stop_string" or
                   "context_length" (the model's context is full)
    trace          every step with its draft, draws and times
    """

    tokens: list[int]
    finish_reason: str
    trace: Trace

    @property
    def steps(self) -> list[Step]:
        """The verification steps."""
        return list(self.trace.steps)

    def text(self, tokenizer: Any) -> str:
        """The tokens as text, special tokens left out."""
        return tokenizer.decode(self.tokens, skip_special_tokens=True)

    @property
    def acceptance_counts(self) -> list[int]:
        """Accepted drafts of each step; those cut off after the end do not count."""
        return [step.num_accepted for step in self.trace.steps]

    @property
    def mean_acceptance_length(self) -> float:
        """L = tokens emitted / verification steps; 1 for plain decoding, NaN without steps.

        The bonus or replacement token of each step counts, tokens cut off do not.
        """
        steps = self.trace.steps
        return sum(len(step.tokens) for step in steps) / len(steps) if steps else float("nan")

    @property
    def first_token_seconds(self) -> float:
        """Prefill and the first step; NaN without steps."""
        steps = self.trace.steps
        return self.trace.prefill_seconds + steps[0].seconds if steps else float("nan")

    @property
    def decode_seconds(self) -> float:
        """All steps: drafting, forwards and acceptance; the prefill is not in it."""
        return sum(step.seconds for step in self.trace.steps)

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted per second of decoding; the prefill is not in it. NaN without tokens."""
        return len(self.tokens) / self.decode_seconds if self.tokens else float("nan")


def generate(
    target: object,
    prompt_ids: object,
    *,
    drafter: Any = None,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 (frozen)
    max_new_tokens: int = 128,
    eos_token_id: object = None,
    confirm_with: object = None,
    stop_strings: Iterable[str] = (),
    tokenizer: Any = None,
    on_step: Callable[[Step], object] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Generation:
    """Continue a prompt with tokens distributed as the target's.

    Args:
        target: a Target, a Hugging Face causal language model, or what `load` returned. Its KV
            cache is emptied first; afterwards it holds the prompt and every emitted token but
            the last, exactly as a fresh prefill would.
        prompt_ids: list of ints, or integer tensor [S] or [1, S]; at least one token.
        drafter: a Drafter; None decodes plainly. A draft longer than what may still be emitted
            is cut.
        sampling: see SamplingConfig. Same seed, same target, same drafter: same tokens.
        max_new_tokens: the budget, >= 0.
        eos_token_id: None: the model's own; []: none; an int or several.
        on_step: called with each Step once its tokens are final (`step.tokens`).
        should_stop: called without arguments before each step; True ends with "stopped".

    Raises:
        UserError: one line on what is wrong with which argument.
    """
    target = as_target(target)
    prompt = prompt_to_ids(prompt_ids, getattr(target, "vocab_size", None))
    budget = check_budget(max_new_tokens)
    eos = eos_ids(eos_token_id, target)
    limit = getattr(target, "max_length", None)
    room = budget if limit is None else min(budget, limit - len(prompt))
    if room < 0 or (room == 0 and budget > 0):
        raise UserError(
            f"the prompt has {len(prompt)} tokens and the model's context holds {limit}: shorten "
            "the prompt so that at least one new token fits"
        )
    if hasattr(target, "reserve"):
        target.reserve(len(prompt) + room)

    sequence = SpeculativeSequence(target, drafter, sampling, sampling.generator())
    prefill_seconds = sequence.start(prompt)
    emitted: list[int] = []
    steps: list[Step] = []
    finish_reason = ""

    def cut(tokens: list[int]) -> list[int]:
        nonlocal finish_reason
        for count, token in enumerate(tokens, start=1):
            if token in eos:
                finish_reason = "eos"
            elif len(emitted) + count == room:
                finish_reason = "length" if room == budget else "context_length"
            if finish_reason:
                return tokens[:count]
        return tokens

    if room == 0:
        finish_reason = "length"
    while not finish_reason:
        if should_stop is not None and should_stop():
            finish_reason = "stopped"
            break
        # the last token of a step is never drafted: more than room - 1 drafts would be wasted
        step = sequence.step(room - len(emitted) - 1, cut).step
        emitted += step.tokens
        steps.append(step)
        if on_step is not None:
            on_step(step)
    trace = Trace(
        prompt_ids=tuple(prompt),
        steps=tuple(steps),
        sampling=sampling,
        max_new_tokens=budget,
        eos_token_ids=tuple(sorted(eos)),
        finish_reason=finish_reason,
        prefill_seconds=prefill_seconds,
        drafter="" if drafter is None else repr(drafter),
    )
    return Generation(emitted, finish_reason, trace)


def prompt_to_ids(prompt_ids: object, vocab_size: int | None) -> list[int]:
    """The prompt as a list of ints; UserError names what is wrong with it."""
    if isinstance(prompt_ids, str):
        raise UserError("the prompt is text: encode it first, e.g. tokenizer(text).input_ids")
    if isinstance(prompt_ids, Sequence) and prompt_ids and isinstance(prompt_ids[0], Sequence):
        if len(prompt_ids) != 1:
            raise UserError(_batch_error(len(prompt_ids)))
        prompt_ids = prompt_ids[0]
    ids = torch.as_tensor(prompt_ids)
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise UserError(_batch_error(ids.shape[0]))
    if ids.numel() == 0:
        raise UserError("the prompt is empty: it must have at least one token, e.g. the BOS token")
    if ids.ndim > 2 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise UserError(
            f"the prompt has shape {tuple(ids.shape)} and dtype {ids.dtype}: it must be whole "
            "numbers of shape [S] or [1, S]"
        )
    tokens: list[int] = ids.reshape(-1).tolist()
    upper = vocab_size if vocab_size is not None else max(tokens) + 1
    if min(tokens) < 0 or max(tokens) >= upper:
        wrong = next(token for token in tokens if not 0 <= token < upper)
        raise UserError(f"the prompt holds token {wrong}: it must lie between 0 and {upper - 1}")
    return tokens


def _batch_error(size: int) -> str:
    return f"a batch of {size} prompts was passed: generate decodes one; call it once per prompt"


def check_budget(max_new_tokens: object) -> int:
    """max_new_tokens as an int >= 0; UserError otherwise."""
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool):
        raise UserError(f"max_new_tokens is {max_new_tokens!r}: it must be a whole number >= 0")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {max_new_tokens}: it must be >= 0")
    return max_new_tokens


def eos_ids(eos_token_id: object, target: object) -> frozenset[int]:
    """The end-of-sequence tokens: None asks the target, [] is none."""
    if eos_token_id is None:
        eos_token_id = getattr(target, "eos_token_ids", ())
    if isinstance(eos_token_id, int) and not isinstance(eos_token_id, bool):
        eos_token_id = (eos_token_id,)
    if isinstance(eos_token_id, Tensor):
        eos_token_id = eos_token_id.reshape(-1).tolist()
    if not isinstance(eos_token_id, Iterable) or isinstance(eos_token_id, str):
        raise UserError(
            f"eos_token_id is {eos_token_id!r}: it must be None, a token or a list of tokens"
        )
    ids = list(eos_token_id)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UserError(f"eos_token_id is {ids!r}: its tokens must be whole numbers")
    return frozenset(ids)

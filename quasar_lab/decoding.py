"""Generate text, plainly or speculatively, with the output distribution of the target.

One loop serves both: plain decoding is speculation with empty drafts.
"""

from typing import Any

from quasar_lab.checks import (
    check_callable,
    check_drafter,
    check_instance,
    check_prompt,
    check_whole,
)
from quasar_lab.drafting.model import ModelDrafter
from quasar_lab.errors import UserError
from quasar_lab.generation import Generation
from quasar_lab.sampling import SamplingConfig
from quasar_lab.sequence import SpeculativeSequence
from quasar_lab.stopping import StopRule, check_stop_strings, eos_ids
from quasar_lab.targets import Target, as_target
from quasar_lab.trace import Step, Trace

__all__ = ["Generation", "GenerationRun", "generate"]


def generate(
    target: object,
    prompt_ids: object,
    *,
    drafter: Any = None,
    sampling: Any = SamplingConfig(),  # noqa: B008 (frozen)
    max_new_tokens: Any = 128,
    eos_token_id: object = None,
    confirm_with: object = None,
    confirm_every: Any = 8,
    stop_strings: Any = (),
    tokenizer: Any = None,
    on_step: Any = None,
    should_stop: Any = None,
) -> Generation:
    """Continue a prompt with tokens distributed as the target's.

    Args:
        target: a Target, a Hugging Face causal language model, or what `load` returned. Its KV
            cache is emptied first; afterwards it holds the prompt and every emitted token but
            the last, exactly as a fresh prefill would.
        prompt_ids: list of ints, integer tensor [S] or [1, S], or what a tokenizer returned (its
            input_ids count); at least one token.
        drafter: a Drafter; None decodes plainly. A draft longer than what may still be emitted
            is cut.
        sampling: see SamplingConfig. Same seed, same target, same drafter: same tokens.
        max_new_tokens: the budget, >= 0.
        eos_token_id: None: the model's own; []: none; an int or several.
        confirm_with: lossless mode: the full-precision model. Blocks of what target emits
            are drafts that it confirms in one forward, so that the output is distributed as its
            own; `Generation.overruled` counts the blocks it changed.
        confirm_every: the tokens of such a block, >= 1.
        stop_strings: texts that end the output once they appear in it, wherever they begin or
            end within a token; needs tokenizer= unless target is what `load` returned.
        on_step: called with each Step once its tokens are final (`step.tokens`).
        should_stop: called without arguments before each step; True ends with "stopped".

    Raises:
        UserError: one line on what is wrong with which argument.
    """
    check_callable("on_step", on_step)
    check_callable("should_stop", should_stop)
    run = GenerationRun(
        target,
        prompt_ids,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        confirm_with=confirm_with,
        confirm_every=confirm_every,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
    )
    while not run.finish_reason:
        if should_stop is not None and should_stop():
            run.stop()
            break
        step = run.step()
        if on_step is not None:
            on_step(step)
    return run.generation()


class GenerationRun:
    """A generation that is taken step by step, for those who run several in turns.

    The arguments and errors are those of `generate`. Making it prefills the prompt. Attributes:
    `finish_reason`, empty while there is something to do; `steps`, the `Step`s so far; `tokens`.
    """

    def __init__(
        self,
        target: object,
        prompt_ids: object,
        *,
        drafter: Any = None,
        sampling: Any = SamplingConfig(),  # noqa: B008 (frozen)
        max_new_tokens: Any = 128,
        eos_token_id: object = None,
        confirm_with: object = None,
        confirm_every: Any = 8,
        stop_strings: Any = (),
        tokenizer: Any = None,
    ) -> None:
        budget = check_whole("max_new_tokens", max_new_tokens, low=0)
        block = check_whole("confirm_every", confirm_every)
        check_instance("sampling", sampling, SamplingConfig)
        tokenizer = getattr(target, "tokenizer", None) if tokenizer is None else tokenizer
        strings = check_stop_strings(stop_strings, tokenizer)
        verifier = as_target(target)
        _check_pair(drafter, verifier, tokenizer)
        tiers = [verifier]
        self._first_tier = None
        if confirm_with is not None:
            drafter = self._first_tier = ModelDrafter(
                verifier, block, tokenizer=getattr(target, "tokenizer", None), drafter=drafter
            )
            verifier = as_target(confirm_with)
            _check_pair(drafter, verifier, getattr(confirm_with, "tokenizer", None))
            tiers.insert(0, verifier)
        vocab_size = getattr(verifier, "vocab_size", None)
        eos = eos_ids(eos_token_id, *tiers, vocab_size=vocab_size)
        self._prompt = check_prompt(prompt_ids, vocab_size)
        limit = getattr(verifier, "max_length", None)
        self._room, reason = room_for(budget, len(self._prompt), limit)
        if hasattr(verifier, "reserve"):
            verifier.reserve(len(self._prompt) + self._room)
        self._eos = tuple(sorted(eos))
        self._drafter, self._sampling = drafter, sampling
        self._stop = StopRule(self._room, reason, eos, strings, tokenizer)
        self._sequence = SpeculativeSequence(
            verifier, drafter, sampling, sampling.generator(), eos_token_ids=self._eos
        )
        self.steps: list[Step] = []
        self.prefill_seconds = self._sequence.start(self._prompt)

    @property
    def finish_reason(self) -> str:
        return self._stop.finish_reason

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far, a list of their own."""
        return list(self._stop.emitted)

    def step(self) -> Step:
        """Draft, verify, emit. UserError once there is a `finish_reason`."""
        if self.finish_reason:
            raise UserError(
                f"the generation has ended ({self.finish_reason}): call step only while "
                "finish_reason is empty"
            )
        # The last token of a step is never a draft: more drafts than this could not be emitted.
        step = self._sequence.step(self._stop.room - 1, self._stop.cut).step
        self.steps.append(step)
        return step

    def stop(self) -> None:
        """End here, with the finish reason "stopped"."""
        self._stop.finish_reason = "stopped"

    def generation(self) -> Generation:
        """What was generated so far."""
        trace = Trace(
            prompt_ids=tuple(self._prompt),
            steps=tuple(self.steps),
            sampling=self._sampling,
            token_budget=self._room,
            eos_token_ids=self._eos,
            finish_reason=self.finish_reason,
            prefill_seconds=self.prefill_seconds,
            drafter="" if self._drafter is None else repr(self._drafter),
            first_tier_steps=() if self._first_tier is None else tuple(self._first_tier.steps),
        )
        return Generation(self.tokens, self.finish_reason, trace)


def room_for(budget: int, prompt_length: int, limit: int | None) -> tuple[int, str]:
    """Tokens that may be emitted, and what ends the output then: the budget or the context."""
    if limit is None or prompt_length + budget <= limit:
        return budget, "length"
    if prompt_length >= limit:
        raise UserError(
            f"the prompt has {prompt_length} tokens and the model's context holds {limit}: shorten "
            "the prompt so that at least one new token fits"
        )
    return limit - prompt_length, "context_length"


def _check_pair(drafter: Any, target: Target, tokenizer: Any) -> None:
    """UserError for a drafter that cannot draft for this target."""
    if drafter is None:
        return
    check_drafter(drafter, target)
    if tokenizer is not None and hasattr(drafter, "check_tokenizer"):
        drafter.check_tokenizer(tokenizer)

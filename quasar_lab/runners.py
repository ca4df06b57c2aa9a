"""Methods made ready to run: targets and drafters built once, used for every prompt."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from quasar_lab.decoding import generate
from quasar_lab.engines import build_target, engine_name
from quasar_lab.generation import Generation
from quasar_lab.loading import LanguageModel
from quasar_lab.methods import Variant
from quasar_lab.sampling import SamplingConfig
from quasar_lab.targets import Target

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Runner:
    """A method with its settings, its target and its drafter.

    options: the drafter and what confirms, as `generate` takes them.
    """

    variant: Variant
    target: Target
    options: dict[str, Any]

    def run(self, prompt_ids: Tensor, **arguments: Any) -> Generation:
        """`generate` with this method; the arguments are the ones it takes besides."""
        return generate(self.target, prompt_ids, **self.options, **arguments)

    def measure(
        self, prompt_ids: Tensor, sampling: SamplingConfig, max_new_tokens: int
    ) -> dict[str, Any]:
        """Generate, and what a row says of it."""
        generation = self.run(prompt_ids, sampling=sampling, max_new_tokens=max_new_tokens)
        return {"engine": engine_name(self.target), **measurements(generation)}


def measurements(generation: Generation) -> dict[str, Any]:
    """What a generation is counted by; times in seconds, the prefill kept apart."""
    trace = generation.trace
    return {
        "prompt_tokens": len(trace.prompt_ids),
        "tokens": generation.tokens,
        "new_tokens": len(generation.tokens),
        "steps": len(trace.steps),
        "drafted": sum(len(step.draft_tokens) for step in trace.steps),
        "accepted": sum(generation.acceptance_counts),
        "mean_acceptance_length": generation.mean_acceptance_length,
        "tokens_per_second": generation.tokens_per_second,
        "decode_seconds": generation.decode_seconds,
        "draft_seconds": sum(step.draft_seconds for step in trace.steps),
        "prefill_seconds": trace.prefill_seconds,
        "finish_reason": generation.finish_reason,
    }


def make_runners(
    models: Mapping[str, Any], variants: Iterable[Variant], engine: str = "auto"
) -> list[Runner]:
    """Methods of the same precision share a target, and with it one KV cache: run one at a time.

    models: precision -> the model that verifies. engine: see `engines.build_target`.
    """
    variants = list(variants)
    build = partial(build_target, engine=engine)
    targets = {precision: build(models[precision]) for precision in precisions(variants)}
    runners = []
    for variant in variants:
        method, draft = variant.method, variant.draft
        options: dict[str, Any] = {}
        if method.make_drafter is not None and draft is not None:
            options["drafter"] = method.make_drafter(draft, models[method.precision], build)
            if method.confirm is not None:
                options["confirm_with"] = targets[method.confirm]
                options["confirm_every"] = draft.confirm_every
        runners.append(Runner(variant, targets[method.precision], options))
    return runners


def precisions(variants: Iterable[Variant]) -> list[str]:
    """Of all the targets that these verify or confirm with."""
    methods = [variant.method for variant in variants]
    return sorted({p for method in methods for p in (method.precision, method.confirm) if p})


def warm_up(model: LanguageModel, runners: list[Runner]) -> None:
    """One short generation each, so that nothing is compiled or first touched while timed."""
    prompt = model.encode_chat("Repeat: one two three one two three one two three")
    for runner in runners:
        runner.run(prompt, max_new_tokens=_WARM_UP_TOKENS, eos_token_id=[])

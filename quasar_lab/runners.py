"""Methods made ready to run: targets and drafters built once, used for every prompt."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from quasar_lab.decoding import generate
from quasar_lab.engines import build_target
from quasar_lab.generation import Generation
from quasar_lab.loading import LanguageModel
from quasar_lab.methods import FULL, INT8, PRUNED, Variant
from quasar_lab.pruning import prune_layers
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


def make_runners(
    model: LanguageModel,
    quantized: Any,
    variants: Iterable[Variant],
    engine: str = "auto",
) -> list[Runner]:
    """Methods of the same precision share a target, and with it one KV cache: run one at a time.

    quantized: the INT8 verifier, None if no method needs it. engine: see `engines.build_target`.
    """
    variants = list(variants)
    methods = [variant.method for variant in variants]
    models = {FULL: model.model, INT8: quantized}
    build = partial(build_target, engine=engine)
    needed = sorted({p for method in methods for p in (method.precision, method.confirm) if p})
    models |= {name: prune_layers(model.model, PRUNED[name]) for name in needed if name in PRUNED}
    targets = {precision: build(models[precision]) for precision in needed}
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


def warm_up(model: LanguageModel, runners: list[Runner]) -> None:
    """One short generation each, so that nothing is compiled or first touched while timed."""
    prompt = model.encode_chat("Repeat: one two three one two three one two three")
    for runner in runners:
        runner.run(prompt, max_new_tokens=_WARM_UP_TOKENS, eos_token_id=[])

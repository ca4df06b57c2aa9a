"""Which engine runs a model: the lean decoder if it knows the architecture, else transformers."""

from typing import Any

from quasar_lab.decoder import FastDecoder
from quasar_lab.errors import UserError
from quasar_lab.targets import HuggingFaceTarget, Target

# What reports call the lean decoder.
LEAN = "quasar-lab decoder"

ENGINES = ("auto", "decoder", "transformers")


def build_target(model: Any, *, max_length: int | None = None, engine: str = "auto") -> Target:
    """A `Target` for a Hugging Face model.

    engine: "decoder" (`FastDecoder`, raises UserError for an architecture it does not know),
    "transformers" (`HuggingFaceTarget`, any causal model), or "auto": the first that works.
    max_length: tokens of context to provide; None leaves it to the engine.
    """
    if engine not in ENGINES:
        raise UserError(f"engine {engine!r}: choose one of {', '.join(ENGINES)}")
    if engine != "transformers":
        try:
            return FastDecoder.from_model(model, max_length=max_length)
        except UserError:
            if engine == "decoder":
                raise
    return HuggingFaceTarget(model, max_length=max_length)


def engine_name(target: object) -> str:
    """What a report calls the engine."""
    names = {FastDecoder: LEAN, HuggingFaceTarget: "transformers"}
    return names.get(type(target), type(target).__name__)

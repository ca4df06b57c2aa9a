"""The methods that a benchmark compares: who verifies, and who drafts.

The four cells of the comparison are {full precision, INT8} x {plain, n-gram}: Quasar is the last
one. The others change one thing: the drafter, the length of the draft, who has the last word, or
what is rounded, and to what. All are measured in one run and counted identically, so that a gain
can be split into what a longer acceptance length gives and what a cheaper verify step gives.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from quasar_lab.checks import check_whole
from quasar_lab.drafting import (
    AdaptiveDrafter,
    Drafter,
    LayerSkipDrafter,
    NGramDrafter,
    SuffixDrafter,
)
from quasar_lab.errors import UserError
from quasar_lab.pruning import kept_layers
from quasar_lab.structure import as_module
from quasar_lab.targets import Target

# FULL is the model as loaded. INT8 rounds its layers and leaves the rest as it is: embeddings,
# norms, KV cache and, as Quasar does, the output layer. In INT8_BF16 that rest is bfloat16, as in
# the paper; in INT8_HEAD the output layer is INT8 too. BF16: all weights bfloat16.
FULL, INT8, INT8_HEAD = "full", "int8", "int8_head"
BF16, INT8_BF16 = "bf16", "int8_bf16"

# The paper's keep ratios, as percentages of the layers: precision names of pruned verifiers.
KEEP_PERCENT = (90, 75, 50)
PRUNED = {f"pruned_{percent}": percent / 100 for percent in KEEP_PERCENT}

BuildTarget = Callable[[Any], Target]


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """What the drafters are built with.

    num_draft_tokens: tokens a draft at most. max_ngram, min_ngram: lengths of the n-grams looked
    up. max_adaptive_tokens: the most that the adaptive length may choose. kept_layers: the share
    of the model's layers that drafts in layer-skip. confirm_every: tokens of a block that full
    precision confirms in the lossless method.
    """

    num_draft_tokens: int = 5
    max_ngram: int = 3
    min_ngram: int = 1
    max_adaptive_tokens: int = 16
    kept_layers: float = 0.5
    confirm_every: int = 8

    def __post_init__(self) -> None:
        self.ngram_drafter()  # raises UserError for values out of range
        check_whole("max_adaptive_tokens", self.max_adaptive_tokens)
        check_whole("confirm_every", self.confirm_every)
        if not isinstance(self.kept_layers, float) or not 0 < self.kept_layers <= 1:
            raise UserError(f"kept_layers is {self.kept_layers!r}: it must be a share up to 1.0")

    def ngram_drafter(self, num_draft_tokens: int | None = None) -> NGramDrafter:
        return NGramDrafter(
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
            num_draft_tokens=self.num_draft_tokens
            if num_draft_tokens is None
            else num_draft_tokens,
        )


DRAFT_COLUMNS = tuple(field.name for field in fields(DraftSettings))


def _ngram(draft: DraftSettings, model: Any, build: BuildTarget) -> Drafter:
    return draft.ngram_drafter()


def _suffix(draft: DraftSettings, model: Any, build: BuildTarget) -> Drafter:
    return SuffixDrafter(draft.num_draft_tokens)


def _layer_skip(draft: DraftSettings, model: Any, build: BuildTarget) -> Drafter:
    return LayerSkipDrafter(model, draft.kept_layers, draft.num_draft_tokens, engine=build)


def _adaptive(draft: DraftSettings, model: Any, build: BuildTarget) -> Drafter:
    most = draft.max_adaptive_tokens
    return AdaptiveDrafter(draft.ngram_drafter(most), most)


def _pruned(keep: float) -> Callable[[DraftSettings, Any, BuildTarget], Drafter]:
    """A drafter with evenly spaced layers of the verifier, sharing its weights."""

    def make(draft: DraftSettings, model: Any, build: BuildTarget) -> Drafter:
        kept = kept_layers(as_module(model), keep)
        return LayerSkipDrafter(model, kept, draft.num_draft_tokens, engine=build)

    return make


@dataclass(frozen=True, slots=True)
class Method:
    """One way to decode.

    precision: of the target that verifies, "full", "bf16", "int8", "int8_bf16", "int8_head" or one
    of `PRUNED` (full precision, fewer layers). make_drafter: given the settings, the verifying
    model and what builds a `Target` of a model; a drafter serves every prompt of a run.
    confirm: the precision of the target that confirms what the verifier emits (lossless mode).
    """

    name: str
    label: str
    precision: str
    make_drafter: Callable[[DraftSettings, Any, BuildTarget], Drafter] | None = None
    confirm: str | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """A method, with the settings of its drafter (None: it drafts nothing)."""

    method: Method
    draft: DraftSettings | None

    def columns(self) -> dict[str, Any]:
        """What a row says of it."""
        drafting = asdict(self.draft) if self.draft else dict.fromkeys(DRAFT_COLUMNS)
        return {"method": self.method.name, **drafting}


METHODS = {
    method.name: method
    for method in (
        Method("plain", "plain", FULL),
        Method("ngram", "n-gram", FULL, _ngram),
        Method("int8", "plain, INT8", INT8),
        Method("quasar", "n-gram, INT8 (Quasar)", INT8, _ngram),
        Method("suffix", "suffix, INT8", INT8, _suffix),
        Method("layer_skip", "layer-skip, INT8", INT8, _layer_skip),
        Method("adaptive", "adaptive n-gram, INT8", INT8, _adaptive),
        Method("lossless", "n-gram, INT8, confirmed", INT8, _ngram, confirm=FULL),
        Method("int8_head", "plain, INT8 with head", INT8_HEAD),
        Method("quasar_head", "n-gram, INT8 with head", INT8_HEAD, _ngram),
        Method("int8_bf16", "plain, INT8 + bf16", INT8_BF16),
        Method("quasar_bf16", "n-gram, INT8 + bf16", INT8_BF16, _ngram),
        Method("bf16", "plain, bf16", BF16),
        Method("ngram_bf16", "n-gram, bf16", BF16, _ngram),
        # the pruning ablation in both readings: who is it that has fewer layers?
        *(
            Method(
                f"pruned_verifier_{percent}",
                f"n-gram, {percent} % of layers verify",
                f"pruned_{percent}",
                _ngram,
            )
            for percent in KEEP_PERCENT
        ),
        *(
            Method(
                f"pruned_drafter_{percent}",
                f"{percent} % of layers draft, all verify",
                FULL,
                _pruned(percent / 100),
            )
            for percent in KEEP_PERCENT
        ),
    )
}

# What the demo compares: {full precision, INT8} x {plain, n-gram}.
FOUR_CELLS = ("plain", "ngram", "int8", "quasar")

# Every ratio is taken against this one.
BASELINE = "plain"


def checked_methods(names: object) -> list[Method]:
    """The methods of these names, the baseline first; UserError for an unknown one."""
    wanted = [names] if isinstance(names, str) else list(names)  # type: ignore[call-overload]
    unknown = [name for name in wanted if name not in METHODS]
    if unknown or not wanted:
        raise UserError(
            f"unknown method {unknown[0] if unknown else ''!r}: choose from {', '.join(METHODS)}"
        )
    return [method for name, method in METHODS.items() if name in {BASELINE, *wanted}]

"""The methods that a benchmark compares: who verifies, and who drafts.

The four cells of the comparison are {full precision, INT8} x {plain, n-gram}: Quasar is the last
one. All four are measured in one run and counted identically, so that a gain can be split into
what a longer acceptance length gives and what a cheaper verify step gives.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quasar_lab.drafting import Drafter, NGramDrafter
from quasar_lab.errors import UserError

FULL, INT8 = "full", "int8"


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """What the drafters are built with: tokens a draft, and the n-gram lengths looked up."""

    num_draft_tokens: int = 5
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        self.ngram_drafter()  # raises UserError for values out of range

    def ngram_drafter(self) -> NGramDrafter:
        return NGramDrafter(
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
            num_draft_tokens=self.num_draft_tokens,
        )


@dataclass(frozen=True, slots=True)
class Method:
    """One way to decode. precision: of the target that verifies, "full" or "int8"."""

    name: str
    label: str
    precision: str
    make_drafter: Callable[[DraftSettings], Drafter] | None = None


METHODS = {
    method.name: method
    for method in (
        Method("plain", "plain", FULL),
        Method("ngram", "n-gram", FULL, DraftSettings.ngram_drafter),
        Method("int8", "plain, INT8", INT8),
        Method("quasar", "n-gram, INT8 (Quasar)", INT8, DraftSettings.ngram_drafter),
    )
}

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

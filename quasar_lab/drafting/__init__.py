"""Drafters: cheap guesses of the next few tokens, behind one protocol (`Drafter`)."""

from quasar_lab.draft import Draft, Drafter
from quasar_lab.drafting.adaptive import AdaptiveDrafter
from quasar_lab.drafting.layer_skip import LayerSkipDrafter
from quasar_lab.drafting.model import ModelDrafter
from quasar_lab.drafting.ngram import NGramDrafter
from quasar_lab.drafting.suffix import SuffixDrafter

__all__ = [
    "AdaptiveDrafter",
    "Draft",
    "Drafter",
    "LayerSkipDrafter",
    "ModelDrafter",
    "NGramDrafter",
    "SuffixDrafter",
]

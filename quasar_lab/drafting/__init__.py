"""Drafters: cheap guesses of the next few tokens, behind one protocol."""

from quasar_lab.drafting.base import Draft, Drafter
from quasar_lab.drafting.ngram import NGramDrafter

__all__ = ["Draft", "Drafter", "NGramDrafter"]

"""What leaving layers out does to a model's predictions and to its text, ratio by ratio."""

from collections.abc import Callable, Iterable, Sequence

import pandas as pd
from torch import Tensor, nn

from quasar_lab.decoding import generate
from quasar_lab.errors import UserError
from quasar_lab.fidelity_runs import Text, summarize_fidelity
from quasar_lab.fidelity_study import compare_at_temperatures
from quasar_lab.loading import LanguageModel
from quasar_lab.pruning import STRATEGIES, kept_layers, prune_layers
from quasar_lab.structure import decoder_layers
from quasar_lab.targets import HuggingFaceTarget


def prune_and_compare(
    lab: LanguageModel,
    texts: Sequence[Text],
    keeps: Iterable[float],
    strategies: Iterable[str] = STRATEGIES,
    *,
    batches: Sequence[Tensor],
    prompt: Tensor,
    max_new_tokens: int = 24,
) -> pd.DataFrame:
    """One row a strategy and keep ratio, each pruned model against `lab.model` on `texts`.

    batches: calibration token ids for the block influence; prompt: token ids that every pruned
    model continues greedily. Columns: strategy, keep, layers (how many stay), kept (which), the
    columns of `summarize_fidelity`, and text (what it wrote). Raises UserError without ratios.
    """
    total = len(decoder_layers(lab.model))
    places: dict[str, tuple[str, float, tuple[int, ...]]] = {}
    for strategy in strategies:
        # block influence looks at the full model once for all ratios
        for keep in sorted(keeps, reverse=True):
            kept = kept_layers(lab.model, keep, strategy, batches=batches)
            places[f"{strategy} {keep:g}"] = (strategy, keep, kept)
    if not places:
        raise UserError("there is nothing to prune: pass keep ratios, such as 0.9, 0.75 and 0.5")
    written: dict[str, str] = {}

    def maker(name: str, kept: tuple[int, ...]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            pruned = prune_layers(lab.model, kept)
            answer = generate(HuggingFaceTarget(pruned), prompt, max_new_tokens=max_new_tokens)
            written[name] = answer.text(lab.tokenizer)
            return pruned

        return make

    makers = {name: maker(name, kept) for name, (_, _, kept) in places.items()}
    summary = summarize_fidelity(compare_at_temperatures(lab.model, makers, texts))
    head = pd.DataFrame(
        [
            {"strategy": strategy, "keep": len(kept) / total, "layers": len(kept), "kept": kept}
            for strategy, _, kept in places.values()
        ],
        index=list(places),
    )
    return head.join(summary).assign(text=pd.Series(written)).reset_index(drop=True)

"""Fidelity seen from several sides: parts of the model, temperatures, and near-ties.

One run of each model is compared at all temperatures, since a temperature only divides the logits.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from quasar_lab.activation_stats import ActivationStats
from quasar_lab.errors import UserError
from quasar_lab.fidelity import compare_logits
from quasar_lab.fidelity_runs import Text, next_token_logits
from quasar_lab.quantization import QuantizationConfig, quantize
from quasar_lab.structure import as_module

# What stays in full precision when only one kind of linear of a Llama is rounded.
LAYER_GROUPS: dict[str, tuple[str, ...]] = {
    "q, k, v": ("o_proj", "mlp"),
    "o": ("q_proj", "k_proj", "v_proj", "mlp"),
    "gate, up": ("self_attn", "down_proj"),
    "down": ("self_attn", "gate_proj", "up_proj"),
}

_DEFAULT = QuantizationConfig()


def compare_at_temperatures(
    reference: object,
    variants: Mapping[str, object],
    texts: Sequence[Text],
    temperatures: Iterable[float] = (1.0,),
) -> pd.DataFrame:
    """`compare_logits` of each variant with the reference, for each text and temperature.

    variants: name -> model, or name -> a function that makes it, so that only one is in memory.
    One row a token, variant and temperature: variant, text (index), label, position, temperature,
    and the columns of `compare_logits`.
    """
    temperatures = list(temperatures)
    rows = [_context(text) for text in texts]
    if not rows or not temperatures or not variants:
        raise UserError("nothing to compare: pass texts, temperatures and variants")
    expected = [next_token_logits(as_module(reference), ids, start) for ids, start in rows]
    tables = []
    for name, variant in variants.items():
        model = as_module(variant() if _is_maker(variant) else variant)  # type: ignore[operator]
        for index, (ids, start) in enumerate(rows):
            other = next_token_logits(model, ids, start)
            for temperature in temperatures:
                table = compare_logits(expected[index], other, temperature)
                place = {
                    "variant": name,
                    "text": index,
                    "label": texts[index].label,
                    "position": range(start, len(ids)),
                    "temperature": temperature,
                }
                tables.append(table.assign(**place)[[*place, *table.columns]])
        del model
    return pd.concat(tables, ignore_index=True)


def _is_maker(variant: object) -> bool:
    return callable(variant) and not isinstance(variant, nn.Module)


def _context(text: Text) -> tuple[Tensor, int]:
    ids = torch.tensor([*text.prompt, *text.tokens])
    start = max(len(text.prompt), 1)
    if len(ids) <= start:
        raise UserError("nothing to compare: a text has no tokens after its prompt")
    return ids, start


def layer_group_variants(
    model: object,
    stats: Mapping[str, ActivationStats] | None,
    config: QuantizationConfig = _DEFAULT,
    *,
    groups: Mapping[str, tuple[str, ...]] = LAYER_GROUPS,
) -> dict[str, Callable[[], nn.Module]]:
    """Makers of models in which only one kind of linear is W8A8, and of one with all of them.

    config: how they are quantised; groups: name -> skip patterns of the linears that stay in full
    precision beside those of `config`.
    """
    module = as_module(model)

    def maker(skip: tuple[str, ...]) -> Callable[[], nn.Module]:
        rest = replace(config, skip=(*config.skip, *skip))
        return lambda: quantize(module, stats, rest)

    return {name: maker(skip) for name, skip in groups.items()} | {"all of them": maker(())}


def by_margin(
    frame: pd.DataFrame, edges: Sequence[float] = (0, 0.25, 0.5, 1, 2, 4)
) -> pd.DataFrame:
    """How often the top-1 differs, by how sure the reference was (margin of its best two tokens).

    edges: lower ends of the classes, in nats. One row a class: tokens, share (of all tokens),
    disagreements, disagreement_rate, mean_tv.
    """
    ends = [*edges, float("inf")]
    labels = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    classes = pd.cut(
        frame["reference_margin"], ends, right=False, labels=[*labels, f"over {edges[-1]:g}"]
    )
    parts = frame.assign(wrong=~frame["top1_match"]).groupby(classes, observed=False)
    table = parts.agg(tokens=("tv", "size"), disagreements=("wrong", "sum"), mean_tv=("tv", "mean"))
    table.insert(1, "share", table["tokens"] / max(len(frame), 1))
    table.insert(3, "disagreement_rate", table["disagreements"] / table["tokens"])
    return table.rename_axis("margin, nats")


def emitted_distribution(
    drafter: Float[Tensor, "V"], verifier: Float[Tensor, "V"]
) -> Float64[Tensor, "V"]:
    """Exact law of the token that one verification emits: a draft from q, tested against p.

    drafter: q, verifier: p, probabilities. An accepted draft contributes min(p, q); what is
    missing to 1 is drawn from max(p - q, 0), normalised (algorithms: section 6).
    """
    p, q = verifier.double(), drafter.double()
    accepted = torch.minimum(p, q)
    residual = (p - q).clamp_min(0)
    total = residual.sum()
    return accepted + (residual / total * (1 - accepted.sum()) if total > 0 else 0)

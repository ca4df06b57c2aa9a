"""W8A8: a model whose linears multiply INT8 weights by INT8 activations.

Quasar verifies drafted tokens with the target itself in this form: half the weight traffic of
bf16, a quarter of fp32's. Weights get one scale per output channel, activations one per token,
computed on the fly (algorithms: section 5). `quantize` smooths, folds and rounds one linear after
the other, and never holds more than the result plus one layer.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quasar_lab import int8_gemm
from quasar_lab.activation_stats import ActivationStats
from quasar_lab.architectures import GROUP_KINDS, SmoothingGroup
from quasar_lab.calibration import CalibrationStats
from quasar_lab.checks import check_flag, check_instance, check_number, check_whole
from quasar_lab.errors import UserError
from quasar_lab.folding import METHODS, Fold
from quasar_lab.mixed_precision import meet_budget
from quasar_lab.quantization_report import QuantizationRecord, quantization_report, report_table
from quasar_lab.quantized_linear import W8A8Linear
from quasar_lab.smoothing_plan import choose_scales
from quasar_lab.structure import (
    as_module,
    copy_with,
    linear_layers,
    matches,
    parameter,
    weight_matrix,
)

__all__ = ["QuantizationConfig", "W8A8Linear", "quantization_report", "quantize"]

# Of a linear's rows, rounded one after the other.
_PARTS = 8


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """What `quantize` does.

    The default is the recipe that stays closest to full precision (benchmarks/fidelity.py);
    `QuantizationConfig("m2")` is the paper's.

    smoothing: "smoothquant", "m2" (Quasar's) or "none"; alpha: SmoothQuant's, a number in [0, 1]
    or "auto" (searched for each group); skip: name patterns of linears that stay in full
    precision, a run of whole name parts with wildcards ("lm_head", "down_proj", "layers.11",
    "model.layers.*.mlp"); groups: what is smoothed, kinds out of "norms" (a norm and its readers),
    "v_o" (value and output projection), "up_down" (up and down projection), or `SmoothingGroup`s
    (default: all kinds; for m2 the norms alone, as published); backend: the INT8 GEMM of the new
    linears; simulated: they compute as transformers does with the exported checkpoint, slowly, to
    compare the two (see `simulated_linear`); num_candidates: thresholds that m2 tries.
    """

    smoothing: str = "smoothquant"
    alpha: float | str = "auto"
    # "| Any": a single name and a list are taken too, and become tuples below
    skip: tuple[str, ...] | Any = ("lm_head",)
    groups: tuple[str | SmoothingGroup, ...] | Any = None
    backend: str = "auto"
    simulated: Any = False
    num_candidates: Any = 100

    def __post_init__(self) -> None:
        if self.smoothing not in METHODS:
            raise UserError(f"smoothing is {self.smoothing!r}: choose from {', '.join(METHODS)}")
        if self.alpha != "auto" and not (
            isinstance(self.alpha, (int, float))
            and not isinstance(self.alpha, bool)
            and 0 <= self.alpha <= 1
        ):
            raise UserError(f'alpha is {self.alpha!r}: choose a number from 0 to 1, or "auto"')
        if self.groups is None:
            object.__setattr__(self, "groups", default_groups(self.smoothing))
        for field in ("skip", "groups"):
            value = getattr(self, field)
            if not isinstance(value, (Iterable, SmoothingGroup)):
                raise UserError(f"{field} is {value!r}: choose names in a list, () for none")
            value = (value,) if isinstance(value, (str, SmoothingGroup)) else tuple(value)
            object.__setattr__(self, field, value)
        for group in self.groups:
            if not isinstance(group, SmoothingGroup) and group not in GROUP_KINDS:
                raise UserError(f"group {group!r}: choose from {', '.join(GROUP_KINDS)}")
        check_flag("simulated", self.simulated)
        check_whole("num_candidates", self.num_candidates, low=2)
        if self.backend != "auto" and self.backend not in int8_gemm.available_backends():
            known = ", ".join(["auto", *int8_gemm.available_backends()])
            raise UserError(f"backend is {self.backend!r}: choose from {known}")


def default_groups(smoothing: str) -> tuple[str, ...]:
    """The kinds of groups that a method smooths unless told otherwise."""
    return ("norms",) if smoothing == "m2" else GROUP_KINDS


_DEFAULT = QuantizationConfig()


def quantize(
    model: object,
    stats: Mapping[str, ActivationStats] | None = None,
    config: Any = _DEFAULT,
    *,
    budget_kl: Any = None,
    evaluation: Iterable[Tensor] | None = None,
) -> nn.Module:
    """A new model whose linears are `W8A8Linear`; `model` itself is unchanged and independent.

    stats: from `calibrate`; without them nothing is smoothed (with a warning when `config` asks
    for smoothing). The result carries a table of what was done, see `quantization_report`.

    budget_kl: the mean KL(full precision || result), in nats a token, that the result may have on
    `evaluation` (sequences of token ids; default: the start of the calibration text). If it has
    more, the linears that cost most stay in full precision, as few as needed: see
    `mixed_precision`, also for what this costs.

    Raises UserError for a skip pattern that matches nothing, an unknown architecture (when
    smoothing), statistics of another model, and NaN or Inf in a weight (naming the linear).
    """
    model = as_module(model)
    check_instance("config", config, QuantizationConfig)
    if budget_kl is not None:
        budget_kl = check_number("budget_kl", budget_kl)
    linears = linear_layers(model)
    for name, module in model.named_modules():
        if isinstance(module, W8A8Linear):
            raise UserError(f"{name} is quantised already: pass the full-precision model")
    if not linears:
        raise UserError(f"a {type(model).__name__} has no linears to quantise")
    _check_finite(model)
    skipped = _skipped(model, linears, config.skip)
    chosen, unsmoothed = choose_scales(
        model,
        stats,
        config.groups if config.smoothing != "none" else (),
        config.smoothing,
        config.alpha,
        num_candidates=config.num_candidates,
        skipped=skipped,
    )
    fold = Fold()
    smoothing_of: dict[str, str] = {}
    for scale in chosen:
        fold.add(model, scale)
        smoothing_of.update(dict.fromkeys(scale.group.readers, scale.method))

    quantized = copy_with(
        model,
        {
            module: _quantize_linear(name, module, fold, smoothing_of.get(name, "none"), config)
            for name, module in linears.items()
            if name not in skipped
        },
    )
    for name, module in quantized.named_modules():
        if fold.touches(name) and not isinstance(module, W8A8Linear):
            fold.apply_(name, module)
    report = report_table(model, skipped, smoothing_of, unsmoothed, stats)
    calibration = stats.amount if isinstance(stats, CalibrationStats) else ""
    record = QuantizationRecord(config, fold, report, calibration=calibration)
    quantized._quantization = record  # type: ignore[assignment]
    if budget_kl is not None:
        if evaluation is None:
            evaluation = getattr(stats, "sequences", ())
        meet_budget(model, quantized, budget_kl, list(evaluation))
    return quantized


def _quantize_linear(
    name: str, module: nn.Module, fold: Fold, smoothing: str, config: QuantizationConfig
) -> W8A8Linear:
    """One linear, folded and rounded a part of its rows at a time: rounding works on several
    float32 copies, which of a whole bfloat16 matrix would be larger than its layer."""
    matrix, bias = weight_matrix(module), None
    qweight = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    weight_scale = torch.empty(len(matrix), device=matrix.device)
    if parameter(module, "bias") is not None:
        bias = torch.empty(len(matrix), dtype=matrix.dtype, device=matrix.device)
    edges = [len(matrix) * part // _PARTS for part in range(_PARTS + 1)]
    for first, last in itertools.pairwise(edges):
        weight, folded_bias = fold.rows(name, module, first, last, torch.float32)
        qweight[first:last], weight_scale[first:last] = int8_gemm.quantize_weight(weight)
        if bias is not None and folded_bias is not None:
            bias[first:last] = folded_bias
    linear = W8A8Linear(
        qweight,
        weight_scale,
        bias,
        backend=config.backend,
        simulated=config.simulated,
        smoothing=smoothing,
    )
    return linear.train(module.training)


def _check_finite(model: nn.Module) -> None:
    for name, tensor in model.named_parameters():
        # the two extremes propagate NaN and Inf, and need no mask as large as the weight
        if not all(map(torch.isfinite, torch.aminmax(tensor.detach()))):
            module, _, kind = name.rpartition(".")
            raise UserError(f"{module}: NaN or Inf in its {kind}, cannot quantise the model")


def _skipped(
    model: nn.Module, linears: Mapping[str, nn.Module], patterns: tuple[str, ...]
) -> dict[str, str]:
    """Linears to leave alone -> the pattern that says so."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    skipped: dict[str, str] = {}
    for pattern in patterns:
        found = [
            name
            for name, module in linears.items()
            if matches(name, pattern) or (pattern == "lm_head" and module is head)
        ]
        # not every model calls its output layer lm_head, or has one
        if not found and pattern != "lm_head":
            raise UserError(
                f"skip pattern {pattern!r} matches no linear; there are e.g. "
                f"{', '.join(list(linears)[:3])}"
            )
        skipped.update(dict.fromkeys(found, pattern))
    return skipped

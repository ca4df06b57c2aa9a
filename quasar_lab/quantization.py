"""W8A8: a model whose linears multiply INT8 weights by INT8 activations.

Quasar verifies drafted tokens with the target itself in this form: half the weight traffic of
bf16, a quarter of fp32's. Weights get one scale per output channel, activations one per token,
computed on the fly (algorithms: section 5). `quantize` smooths, folds and rounds one linear after
the other, and never holds more than the result plus one layer.
"""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pandas as pd
import torch
from jaxtyping import Float32, Int8
from torch import Tensor, nn

from quasar_lab import int8_gemm
from quasar_lab.activation_stats import ActivationStats
from quasar_lab.architectures import (
    GROUP_KINDS,
    SmoothingGroup,
    find_groups,
)
from quasar_lab.errors import UserError
from quasar_lab.folding import METHODS, Fold, GroupScale, group_scale
from quasar_lab.group_check import wrong_groups
from quasar_lab.structure import as_module, linear_layers, weight_matrix, weight_modules

# A channel this many times above the median makes a token's INT8 step too coarse for the rest.
OUTLIER_RATIO = 100.0


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """What `quantize` does.

    smoothing: "m2" (Quasar's), "smoothquant" or "none"; alpha: SmoothQuant's, a number in [0, 1]
    or "auto" (searched for each group); skip: name patterns of linears that stay in full
    precision, a run of whole name parts with wildcards ("lm_head", "down_proj", "layers.11",
    "model.layers.*.mlp"); groups: what is smoothed, kinds out of "norms" (a norm and its readers),
    "v_o" (value and output projection), "up_down" (up and down projection), or `SmoothingGroup`s;
    backend: the INT8 GEMM of the new linears; num_candidates: thresholds that m2 tries.
    """

    smoothing: str = "m2"
    alpha: float | str = 0.5
    skip: tuple[str, ...] = ("lm_head",)
    groups: tuple[str | SmoothingGroup, ...] = ("norms",)
    backend: str = "auto"
    num_candidates: int = 100

    def __post_init__(self) -> None:
        if self.smoothing not in METHODS:
            raise UserError(f"smoothing is {self.smoothing!r}: choose from {', '.join(METHODS)}")
        if self.alpha != "auto" and not (
            isinstance(self.alpha, (int, float)) and 0 <= self.alpha <= 1
        ):
            raise UserError(f'alpha is {self.alpha!r}: choose a number from 0 to 1, or "auto"')
        for field in ("skip", "groups"):
            value = getattr(self, field)
            value = (value,) if isinstance(value, (str, SmoothingGroup)) else tuple(value)
            object.__setattr__(self, field, value)
        for group in self.groups:
            if not isinstance(group, SmoothingGroup) and group not in GROUP_KINDS:
                raise UserError(f"group {group!r}: choose from {', '.join(GROUP_KINDS)}")
        if self.num_candidates < 2:
            raise UserError(f"num_candidates is {self.num_candidates}: choose at least 2")


class W8A8Linear(nn.Module):
    """y = x W^T + bias with INT8 weights and dynamically quantised INT8 activations.

    qweight: int8[N, K]; weight_scale: fp32[N], which stays fp32 whatever the model is cast to
    (a bf16 scale would be off by up to 0.4 %); bias: [N] or None, in the model's dtype.
    """

    qweight: Int8[Tensor, "N K"]
    weight_scale: Float32[Tensor, "N"]
    bias: Tensor | None

    def __init__(
        self,
        qweight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        backend: str = "auto",
        smoothing: str = "none",
    ) -> None:
        super().__init__()
        self.register_buffer("qweight", qweight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        self.backend = backend
        self.smoothing = smoothing

    @property
    def in_features(self) -> int:
        return self.qweight.shape[1]

    @property
    def out_features(self) -> int:
        return self.qweight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> [..., N] in x's dtype."""
        return int8_gemm.w8a8_linear(
            x, self.qweight, self.weight_scale, self.bias, backend=self.backend
        )

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        scale = self.weight_scale
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != torch.float32:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, W8A8 (int8 weights per channel, int8 activations per "
            f"token), backend={self.backend}, smoothing={self.smoothing}"
        )


_DEFAULT = QuantizationConfig()


def quantize(
    model: object,
    stats: Mapping[str, ActivationStats] | None = None,
    config: QuantizationConfig = _DEFAULT,
) -> nn.Module:
    """A new model whose linears are `W8A8Linear`; `model` itself is unchanged and independent.

    stats: from `calibrate`; without them nothing is smoothed (with a warning when `config` asks
    for smoothing). The result carries a table of what was done, see `quantization_report`.
    """
    model = as_module(model)
    linears = linear_layers(model)
    if not linears:
        raise UserError(f"a {type(model).__name__} has no linears to quantise")
    skipped = _skipped(model, linears, config.skip)
    chosen, unsmoothed = _choose_scales(model, stats, config, skipped)
    fold = Fold()
    smoothing_of: dict[str, str] = {}
    for scale in chosen:
        fold.add(model, scale)
        smoothing_of.update(dict.fromkeys(scale.group.readers, scale.method))

    replaced: dict[int, nn.Module] = {}
    for name, module in linears.items():
        if name not in skipped:
            weight, bias = fold.linear(name, module)
            if not torch.isfinite(weight).all():
                raise UserError(f"{name}: NaN or Inf in the weight")
            qweight, weight_scale = int8_gemm.quantize_weight(weight)
            replaced[id(module)] = W8A8Linear(
                qweight,
                weight_scale,
                None if bias is None else bias.to(weight_matrix(module).dtype),
                backend=config.backend,
                smoothing=smoothing_of.get(name, "none"),
            ).train(module.training)
    # deepcopy takes the linears from its memo instead of copying them
    quantized = copy.deepcopy(model, dict(replaced))
    for name, module in quantized.named_modules():
        if fold.touches(name) and not isinstance(module, W8A8Linear):
            fold.apply_(name, module)
    quantized._quantization_report = _report(
        model, linears, skipped, smoothing_of, unsmoothed, stats
    )
    return quantized


def quantization_report(model: nn.Module) -> pd.DataFrame:
    """What `quantize` did, one row a linear.

    name; shape; precision ("W8A8" or "full"); smoothing (the method, or "none"); reason (why it is
    not smoothed or not quantised, else empty); outlier_ratio (largest over median channel absmax
    of the input); outlier (ratio above 100).
    """
    report = getattr(model, "_quantization_report", None)
    if not isinstance(report, pd.DataFrame):
        raise UserError(f"this {type(model).__name__} does not come from quantize()")
    return report.copy()


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` is a run of whole parts of the dotted `name` (wildcards allowed)."""
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


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


def _choose_scales(
    model: nn.Module,
    stats: Mapping[str, ActivationStats] | None,
    config: QuantizationConfig,
    skipped: Mapping[str, str],
) -> tuple[list[GroupScale], dict[str, str]]:
    """The scales to fold, and for groups that get none: reader -> why."""
    if config.smoothing == "none" or not config.groups:
        return [], dict.fromkeys(linear_layers(model), "smoothing is off")
    if stats is None:
        warnings.warn(
            "quantize() without statistics does not smooth: calibrate first", stacklevel=3
        )
        return [], dict.fromkeys(linear_layers(model), "no calibration statistics")
    kinds = tuple(g for g in config.groups if isinstance(g, str))
    groups = find_groups(model, kinds) if kinds else []
    groups += [g for g in config.groups if isinstance(g, SmoothingGroup)]
    unsmoothed: dict[str, str] = {}
    for group in wrong_groups(model, groups):
        reason = f"scaling {group.source} is not exact: something else reads it"
        if group.kind == "norms":
            raise UserError(f"{reason}; leave 'norms' out of groups")
        unsmoothed.update(dict.fromkeys(group.readers, reason))
        groups.remove(group)
    chosen = []
    for group in groups:
        if all(reader in skipped for reader in group.readers):
            continue
        chosen.append(
            group_scale(
                model,
                stats,
                group,
                config.smoothing,
                config.alpha,
                num_candidates=config.num_candidates,
            )
        )
    return chosen, unsmoothed


def _report(
    model: nn.Module,
    linears: Mapping[str, nn.Module],
    skipped: Mapping[str, str],
    smoothing_of: Mapping[str, str],
    unsmoothed: Mapping[str, str],
    stats: Mapping[str, ActivationStats] | None,
) -> pd.DataFrame:
    rows = []
    for name, module in weight_modules(model).items():
        ratio = stats[name].outlier_ratio if stats is not None and name in stats else float("nan")
        if name in skipped:
            reason = f"skipped: matches {skipped[name]!r}"
        elif name not in linears:
            reason = f"skipped: a {type(module).__name__} is no linear"
        elif name not in smoothing_of:
            reason = "not smoothed: " + unsmoothed.get(name, "in no smoothed group")
        else:
            reason = ""
        rows.append(
            {
                "name": name,
                "shape": tuple(next(module.parameters(recurse=False)).shape),
                "precision": "full" if name in skipped or name not in linears else "W8A8",
                "smoothing": smoothing_of.get(name, "none"),
                "reason": reason,
                "outlier_ratio": ratio,
                "outlier": ratio > OUTLIER_RATIO,
            }
        )
    return pd.DataFrame(rows)

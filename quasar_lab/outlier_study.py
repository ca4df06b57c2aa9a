"""One linear under the microscope: its outliers, what smoothing makes of them, the error it leaves.

Everything here works on recorded statistics and their small sample of inputs: no model is run, so a
reader can turn a knob and see the answer at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from quasar_lab.activation_stats import ActivationStats
from quasar_lab.architectures import SmoothingGroup, find_groups
from quasar_lab.errors import UserError
from quasar_lab.folding import METHODS, group_scale
from quasar_lab.int8_gemm import quantize_activation, quantize_weight
from quasar_lab.structure import as_module, linear_layers, weight_matrix

# The two ways to scale activations: as the lab does, and the static one that it is compared with.
SCHEMES = ("per token, dynamic", "per tensor, static")


@dataclass(frozen=True, slots=True, eq=False)
class LinearStudy:
    """A linear before and after smoothing, on the tokens of its calibration sample.

    scale: s[C]; activations: X0[T, C]; weight: [N, C], both as in the model (before smoothing);
    activation_absmax: a[C] over all calibration tokens; errors, errors_before: of each token, the
    relative error of its W8A8 output (Euclidean norm) with and without smoothing.
    """

    name: str
    method: str
    scale: Float32[Tensor, "C"]
    activations: Float32[Tensor, "T C"]
    weight: Float32[Tensor, "N C"]
    activation_absmax: Float32[Tensor, "C"]
    errors_before: Float32[Tensor, "T"]
    errors: Float32[Tensor, "T"]

    @property
    def weight_absmax(self) -> Float32[Tensor, "C"]:
        """w_j = max |W[:, j]| of this linear alone."""
        return self.weight.abs().amax(0)

    @property
    def smoothed_activations(self) -> Float32[Tensor, "T C"]:
        """X0 / s."""
        return self.activations / self.scale

    @property
    def smoothed_weight(self) -> Float32[Tensor, "N C"]:
        """W * s."""
        return self.weight * self.scale

    def numbers(self) -> pd.DataFrame:
        """Before and after: the outlier ratios of both operands, and the error of the output."""
        rows = {}
        for when, s, errors in (
            ("before", torch.ones_like(self.scale), self.errors_before),
            ("after", self.scale, self.errors),
        ):
            rows[when] = {
                "activation max / median": _ratio(self.activation_absmax / s),
                "weight max / median": _ratio(self.weight_absmax * s),
                "error, median token": float(errors.median()),
                "error, worst token": float(errors.max()),
            }
        return pd.DataFrame(rows).T


def _ratio(values: Tensor) -> float:
    return float(values.max() / values.median().clamp_min(1e-12))


def study_linear(
    model: object,
    stats: Mapping[str, ActivationStats],
    name: str,
    method: str = "m2",
    alpha: float | str = 0.5,
    *,
    groups: Mapping[str, SmoothingGroup] | None = None,
) -> LinearStudy:
    """The linear `name`, smoothed together with the linears that share its input.

    stats: from `calibrate`; method: "none", "smoothquant" (at `alpha`, a number or "auto") or
    "m2"; groups: what `groups_by_reader` returned, to save the search. Linears that no group covers
    (lm_head) stay as they are whatever the method. Raises UserError for an unknown name or method.
    """
    module = as_module(model)
    if name not in linear_layers(module) or name not in stats:
        raise UserError(f"no linear named {name!r} in this model and its statistics")
    if method not in METHODS:
        raise UserError(f"method is {method!r}: choose from {', '.join(METHODS)}")
    weight = weight_matrix(module.get_submodule(name)).detach().float()
    groups = groups_by_reader(module) if groups is None else groups
    scale = torch.ones(weight.shape[1])
    label = "none"
    if method != "none" and name in groups:
        chosen = group_scale(module, stats, groups[name], method, alpha)
        scale, label = groups[name].expand(chosen.scale), chosen.method
    x = stats[name].sample
    plain = token_errors(x, weight)
    smoothed = plain if label == "none" else token_errors(x, weight, scale)
    return LinearStudy(name, label, scale, x, weight, stats[name].absmax, plain, smoothed)


def groups_by_reader(model: object) -> dict[str, SmoothingGroup]:
    """Linear -> the smoothing group that covers its input, of all kinds."""
    return {reader: g for g in find_groups(as_module(model)) for reader in g.readers}


def token_errors(
    x: Float[Tensor, "T C"],
    weight: Float[Tensor, "N C"],
    scale: Float[Tensor, "C"] | None = None,
    *,
    scheme: str = "per token, dynamic",
    absmax: float | None = None,
) -> Float32[Tensor, "T"]:
    """Relative error of each token's output x W^T in W8A8, after smoothing by `scale`.

    scheme: one of `SCHEMES`; absmax: the largest |x / s| seen in calibration, which fixes the step
    of the static scheme (default: of `x` itself); what is larger is clipped.
    """
    scale = torch.ones(weight.shape[1]) if scale is None else scale
    divided = x / scale
    if scheme == SCHEMES[0]:
        rounded = torch.mul(*quantize_activation(divided))
    elif scheme == SCHEMES[1]:
        step = (float(divided.abs().max()) if absmax is None else absmax) / 127
        rounded = (divided / step).round().clamp(-127, 127) * step
    else:
        raise UserError(f"scheme is {scheme!r}: choose from {'; '.join(SCHEMES)}")
    qweight, weight_scale = quantize_weight(weight * scale)
    reference = x @ weight.T
    difference = rounded @ qweight.float().T * weight_scale - reference
    return difference.norm(dim=1) / reference.norm(dim=1).clamp_min(1e-12)


def outlier_table(
    model: object, stats: Mapping[str, ActivationStats], names: Iterable[str] | None = None
) -> pd.DataFrame:
    """How uneven each linear's input is, and what that costs: one row a linear, in model order.

    Columns: name, layer (int, -1 outside the layers), projection, ratio (largest over median
    channel absmax), absmax, channel (of the largest), error (median over the sample's tokens) and
    worst_error (of its worst token): relative errors of the output in W8A8 without smoothing.
    """
    modules = linear_layers(as_module(model))
    rows = []
    for name in modules if names is None else names:
        s = stats[name]
        errors = token_errors(s.sample, weight_matrix(modules[name]).detach().float())
        parts = name.split(".")
        numbers = [int(part) for part in parts if part.isdigit()]
        rows.append(
            {
                "name": name,
                "layer": numbers[0] if numbers else -1,
                "projection": parts[-1],
                "ratio": s.outlier_ratio,
                "absmax": float(s.absmax.max()),
                "channel": int(s.absmax.argmax()),
                "error": float(errors.median()),
                "worst_error": float(errors.max()),
            }
        )
    return pd.DataFrame(rows)


def method_table(
    model: object,
    stats: Mapping[str, ActivationStats],
    names: Iterable[str],
    alphas: Iterable[float] = tuple(round(0.1 * i, 1) for i in range(11)),
) -> pd.DataFrame:
    """Error of the output against alpha for each linear, and that of no smoothing and of m2.

    Columns: name, method ("none", "m2" or "smoothquant"), alpha (NaN for the first two), error
    (median token), channels (how many have a scale other than 1).
    """
    groups = groups_by_reader(model)
    settings = [("none", float("nan")), ("m2", float("nan"))]
    settings += [("smoothquant", alpha) for alpha in alphas]
    rows = []
    for name in names:
        for method, alpha in settings:
            study = study_linear(model, stats, name, method, alpha, groups=groups)
            rows.append(
                {
                    "name": name,
                    "method": method,
                    "alpha": alpha,
                    "error": float(study.errors.median()),
                    "channels": int((study.scale != 1).sum()),
                }
            )
    return pd.DataFrame(rows)


def pool_largest(matrix: Float[Tensor, "R C"], rows: int, columns: int) -> Float[Tensor, "r c"]:
    """|matrix| shrunk to at most rows x columns; each cell keeps the largest of its block.

    Averaging or skipping would lose the very outliers that a picture is meant to show.
    """
    bands = matrix.abs().tensor_split(min(rows, len(matrix)))
    narrow = torch.stack([band.amax(0) for band in bands])
    blocks = narrow.tensor_split(min(columns, narrow.shape[1]), dim=1)
    return torch.stack([block.amax(1) for block in blocks], dim=1)

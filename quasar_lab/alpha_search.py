"""SmoothQuant's alpha, chosen group by group by the error it leaves.

The best balance between activations and weights differs from layer to layer. For each alpha of a
grid, the group's linears are run in W8A8 on the calibration sample, and the alpha with the
smallest error against their float output wins.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from quasar_lab.activation_stats import ActivationStats
from quasar_lab.int8_gemm import quantize_activation, quantize_weight
from quasar_lab.smoothing import smoothquant_scale

ALPHAS = tuple(round(0.1 * i, 1) for i in range(11))


def w8a8_error(
    x: Float[Tensor, "tokens C"], weights: Sequence[Float[Tensor, "_ C"]], scale: Float[Tensor, "C"]
) -> float:
    """Relative squared error of x W^T in W8A8 after smoothing by `scale`, summed over weights."""
    rounded = torch.mul(*quantize_activation(x / scale))
    error = 0.0
    for weight in weights:
        weight = weight.float()
        qweight, weight_scale = quantize_weight(weight * scale)
        output = rounded @ qweight.float().T * weight_scale
        reference = x @ weight.T
        error += float(
            (output - reference).square().sum() / reference.square().sum().clamp_min(1e-30)
        )
    return error


def search_alpha(
    stats: ActivationStats,
    weight_absmax: Float32[Tensor, "C"],
    weights: Sequence[Float[Tensor, "_ C"]],
    alphas: Sequence[float] = ALPHAS,
) -> tuple[float | None, Float32[Tensor, "C"]]:
    """(alpha, scale) of the smallest `w8a8_error` on the sample; (None, ones): nothing helps."""
    best_alpha: float | None = None
    best_scale = torch.ones_like(weight_absmax)
    best_error = w8a8_error(stats.spread_sample, weights, best_scale)
    for alpha in alphas:
        scale = smoothquant_scale(stats.absmax, weight_absmax, alpha)
        error = w8a8_error(stats.spread_sample, weights, scale)
        if error < best_error:
            best_alpha, best_scale, best_error = alpha, scale, error
    return best_alpha, best_scale

"""SmoothQuant and m2: move the outliers from the activations into the weights.

A channel whose activations are 100 times the others' makes rounding a token coarse; weights are
flat and have room. Dividing channel j of the input by s_j and multiplying column j of the weights
by s_j leaves the product unchanged and evens the two out. The division costs nothing: it is
folded into whatever produced the input (a norm's weight, or the rows of an earlier linear).

- SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): s_j = a_j^alpha / w_j^(1 - alpha).
- m2, the "enhanced SmoothQuant" that Quasar (arXiv 2603.01399) uses: the same rule at alpha .5,
  but only for channels beyond a threshold, which is searched.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from quasar_lab.activation_stats import ActivationStats
from quasar_lab.errors import UserError

SCALE_FLOOR = 1e-5


def smoothquant_scale(
    act_absmax: Tensor, weight_absmax: Tensor, alpha: float = 0.5
) -> Float32[Tensor, "C"]:
    """s_j = a_j^alpha / w_j^(1 - alpha), at least 1e-5 (SmoothQuant, equation 4).

    act_absmax: a[C], largest |x| of each channel; weight_absmax: w[C], largest |W[:, j]| over all
    linears that read the channel (floored at 1e-5); alpha: how much of the difficulty moves into
    the weights, from 0 (they are flattened instead) to 1 (all of it). A dead channel (a_j = 0)
    gets 1: a floor of 1e-5 would blow up its first real activation.
    """
    if act_absmax.ndim != 1 or act_absmax.shape != weight_absmax.shape:
        raise UserError(
            f"act_absmax {list(act_absmax.shape)} and weight_absmax {list(weight_absmax.shape)} "
            "must be vectors of the same length"
        )
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha is {alpha}: choose it between 0 and 1")
    a, w = act_absmax.float(), weight_absmax.float().clamp_min(SCALE_FLOOR)
    if not (torch.isfinite(a).all() and torch.isfinite(w).all() and (a >= 0).all()):
        raise UserError("act_absmax and weight_absmax must be finite and not negative")
    scale = (a**alpha / w ** (1 - alpha)).clamp_min(SCALE_FLOOR)
    return torch.where(a > 0, scale, 1.0)


def weight_absmax(weights: Sequence[Float[Tensor, "_ C"]]) -> Float32[Tensor, "C"]:
    """w_j = max |W[:, j]| over all linears of a group, floored at 1e-5."""
    largest = torch.stack([w.detach().abs().amax(0).float() for w in weights])
    return largest.amax(0).clamp_min(SCALE_FLOOR)


def m2_scale(
    stats: ActivationStats,
    weights: Sequence[Tensor] | Tensor,
    biases: Sequence[Tensor | None] | Tensor | None = None,
    num_candidates: int = 100,
    *,
    absmax: Tensor | None = None,
) -> Float32[Tensor, "C"]:
    """The m2 rule ("enhanced SmoothQuant") for one group of linears.

    stats: of the input x[..., C] that the linears share; weights: [W] for a single linear,
    [gate, up], or [q, k, v], each [N, C]; biases: None, or one [N] (or None) for each weight. A
    bare tensor counts as a list of one. num_candidates: how many thresholds are tried. absmax: w[C]
    where it is not simply the largest |W[:, j]| of `weights`.

    Without an outlier (3 sigma >= T) every channel gets sqrt(a_j / w_j), which is SmoothQuant at
    alpha .5. Otherwise only channels with c_j > t get sqrt(c_j / w_j), the rest 1; t is the one of
    sigma + (T - sigma) i / (num_candidates - 1) with the smallest `m2` loss, the first on a tie.
    """
    weights, biases = _as_lists(weights, biases)
    channels = len(stats.absmax)
    if len(weights) not in (1, 2, 3):
        raise UserError(f"{len(weights)} weights: pass [W], [gate, up] or [q, k, v]")
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != channels:
            raise UserError(
                f"a weight has shape {list(weight.shape)}, the statistics have {channels} channels"
            )
        if not torch.isfinite(weight).all():
            raise UserError("NaN or Inf in a weight")
    if len(weights) == 3 and len(weights[0]) % len(weights[1]):
        raise UserError(
            f"q has {len(weights[0])} outputs: a multiple of k's {len(weights[1])} is needed"
        )
    if num_candidates < 2:
        raise UserError(f"num_candidates is {num_candidates}: choose at least 2")

    w = weight_absmax(weights) if absmax is None else absmax
    if 3 * stats.sigma >= stats.threshold:
        return smoothquant_scale(stats.absmax, w, alpha=0.5)

    c = stats.center_absmax
    smoothed = _sqrt(c / w).clamp_min(SCALE_FLOOR)
    loss = _M2Loss(stats, weights, biases)
    best_loss, best_scale = torch.inf, torch.ones_like(c)
    previous: Tensor | None = None
    for i in range(num_candidates):
        t = stats.sigma + (stats.threshold - stats.sigma) * i / (num_candidates - 1)
        outlier = c > t
        if previous is not None and torch.equal(outlier, previous):
            continue  # the same candidate again: a tie, which the smaller threshold wins
        previous = outlier
        scale = torch.where(outlier, smoothed, 1.0)
        candidate_loss = loss(scale)
        if candidate_loss < best_loss:
            best_loss, best_scale = candidate_loss, scale
    return best_scale


class _M2Loss:
    """Mean squared error of f(x) when the centred, smoothed input is rounded to 8 bits."""

    def __init__(
        self, stats: ActivationStats, weights: list[Tensor], biases: list[Tensor | None]
    ) -> None:
        # gate and up are judged by the gate alone, q, k, v by the attention they produce
        used = 3 if len(weights) == 3 else 1
        self.widths = [len(w) for w in weights[:used]]
        self.weight = torch.cat([w.float() for w in weights[:used]])
        self.bias = torch.cat(
            [
                torch.zeros_like(w[:, 0], dtype=torch.float32) if b is None else b.float()
                for w, b in zip(weights[:used], biases[:used], strict=True)
            ]
        )
        self.centred = stats.sample - stats.center
        # W m: the centre's share of the output, which stays exact
        self.offset = self.bias + self.weight @ stats.center
        self.reference = self.output(stats.sample @ self.weight.T + self.bias)

    def output(self, linear: Float[Tensor, "N0 N"]) -> Float[Tensor, "N0 _"]:
        """f: the linear's own output, or the unmasked attention that q, k and v give."""
        if len(self.widths) == 1:
            return linear
        q, k, v = linear.split(self.widths, dim=1)
        d_k = k.shape[1]
        attended = [(q_h @ k.T / d_k**0.5).softmax(dim=-1) @ v for q_h in q.split(d_k, dim=1)]
        return torch.cat(attended, dim=1)

    def __call__(self, scale: Float[Tensor, "C"]) -> float:
        rounded = fake_quantize_per_tensor(self.centred / scale)
        output = self.output(rounded @ (self.weight * scale).T + self.offset)
        return (output - self.reference).square().mean().item()


def _sqrt(x: Float32[Tensor, "C"]) -> Float32[Tensor, "C"]:
    """Correctly rounded: torch's own float32 root is off in the last bit on some CPUs.

    The largest c_j / s_j puts the zero point of the centred, symmetric range on a tie (127.5), so
    the last bit of a scale can decide which candidate wins.
    """
    return x.double().sqrt().float()


def fake_quantize_per_tensor(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Round to 8 bits and back: per-tensor, asymmetric, over a range that includes zero."""
    low, high = x.min().clamp_max(0.0), x.max().clamp_min(0.0)
    step = (high - low) / 255
    if step == 0:
        return x.clone()
    zero_point = torch.round(-low / step)
    return ((torch.round(x / step) + zero_point).clamp(0, 255) - zero_point) * step


def _as_lists(
    weights: Sequence[Tensor] | Tensor, biases: Sequence[Tensor | None] | Tensor | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    weights = [weights] if isinstance(weights, Tensor) else list(weights)
    if biases is None:
        return weights, [None] * len(weights)
    biases = [biases] if isinstance(biases, Tensor) else list(biases)
    if len(biases) != len(weights):
        raise UserError(f"{len(biases)} biases for {len(weights)} weights: pass one (or None) each")
    return weights, biases

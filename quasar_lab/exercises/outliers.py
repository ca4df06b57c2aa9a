"""The exercises of notebook 02: a smoothing scale, a silent channel, the alpha of least error."""

import math
from typing import Any

import torch
from torch import Tensor

from quasar_lab.alpha_search import ALPHAS, w8a8_error
from quasar_lab.exercises import WrongError, answered, number
from quasar_lab.smoothing import smoothquant_scale, weight_absmax

# The silent channel of the second exercise: its scale by formula is the floor.
SILENT_FLOOR, SILENT_LATER = 1e-5, 0.5


def smoothing_scale(answer: Any) -> str | None:
    """Right: large activations are divided, weights multiplied, and alpha says how far."""
    a, w = torch.tensor([4.0, 9.0, 4.0]), torch.tensor([1.0, 0.25, 2.0])
    for alpha in (0.5, 0.8, 0.0, 1.0):
        # copies: an answer that works in place must not spoil the next case
        given = answered(answer(a.clone(), w.clone(), alpha))
        try:
            s = torch.as_tensor(given, dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise WrongError(f"Return a tensor, one scale for each channel ({error}).") from None
        if s.shape != a.shape:
            return f"Return one scale for each channel, [{len(a)}]; yours has {list(s.shape)}."
        if not torch.isfinite(s).all():
            return f"At alpha = {alpha} your scale is {_numbers(s)}: not finite."
        right = smoothquant_scale(a, w, alpha)
        if torch.allclose(s, right, rtol=1e-4):
            continue
        said = f"For a = {_numbers(a)}, w = {_numbers(w)}, alpha = {alpha} you give {_numbers(s)}."
        for mistake, hint in (
            (1 / right, "That is 1 / s: X is divided by s, so large activations need a large s."),
            (
                smoothquant_scale(a, w, 1 - alpha),
                "The exponents are swapped: alpha belongs to a, 1 - alpha to w.",
            ),
            (a**alpha * w ** (1 - alpha), "Divide by w^(1 - alpha): a large weight needs no help."),
            (a**alpha / w**alpha, "The exponent of w is 1 - alpha, the same as alpha only at 0.5."),
            (a**alpha, "The weights are missing: divide by w^(1 - alpha)."),
            ((a / w).sqrt(), "That is right at alpha = 0.5 only: use the alpha you are given."),
            (
                smoothquant_scale(a, w, alpha).max().expand(3),
                "One scale for all channels changes nothing: each channel needs its own.",
            ),
        ):
            if torch.allclose(s, torch.as_tensor(mistake), rtol=1e-4):
                return f"{said} {hint}"
        return f"{said} It should be {_numbers(right)}: s_j = a_j^alpha / w_j^(1 - alpha)."
    return None


def dead_channel(answer: Any) -> str | None:
    """Right: a channel that calibration never saw is left alone, s = 1."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        return "Give two numbers: the scale you would choose, and what the floor makes of 0.5."
    scale, magnified = (number(part) for part in answer)
    right = SILENT_LATER / SILENT_FLOOR
    if math.isclose(magnified, SILENT_LATER * SILENT_FLOOR, rel_tol=1e-3):
        return "The activation is *divided* by s, and s is tiny: it becomes larger, not smaller."
    if math.isclose(magnified, 1 / SILENT_FLOOR, rel_tol=1e-3):
        return "1e5 is the factor. The activation was 0.5 before."
    if not math.isclose(magnified, right, rel_tol=1e-3):
        return f"0.5 / 1e-5 is not {magnified:g}: the activation is divided by s."
    if math.isclose(scale, SILENT_FLOOR, rel_tol=1e-3):
        return (
            "With s = 1e-5 the value you just computed would set the step of its whole token, and "
            "every other channel would round to 0. Which s leaves the channel as it is?"
        )
    if scale == 0:
        return "Nothing can be divided by 0. Which s leaves the channel as it is?"
    if not math.isclose(scale, 1.0, rel_tol=1e-6):
        return f"{scale:g} rescales a channel of which you know nothing. Which s leaves it alone?"
    return None


def best_alpha(answer: Any) -> str | None:
    """Right: there is no best alpha for all layers, only a best one for each."""
    for case in range(3):
        x, weight = alpha_case(case)
        alpha = number(answer(x.clone(), weight.clone()))
        if not 0 <= alpha <= 1:
            return f"alpha is {alpha:g}: choose it from 0 to 1. Did you return the error itself?"
        errors = {a: alpha_error(x, weight, a) for a in ALPHAS}
        best = min(errors, key=lambda a: errors[a])
        # between two grid points or within 2 % of the least error is as good
        if alpha_error(x, weight, alpha) <= 1.02 * errors[best]:
            continue
        worst = max(errors, key=lambda a: errors[a])
        said = f"In case {case} your alpha {alpha:g} leaves an error of {_of(x, weight, alpha)}"
        if math.isclose(alpha, worst):
            return f"{said}, the largest of all: look for the smallest."
        if math.isclose(alpha, 0.5):
            return f"{said}, alpha {best:g} leaves {errors[best]:.2g}. 0.5 is only a default."
        return (
            f"{said}, alpha {best:g} leaves {errors[best]:.2g}. Round both operands after "
            "smoothing and compare the *output* with x @ weight.T."
        )
    return None


def alpha_case(number: int) -> tuple[Tensor, Tensor]:
    """Inputs x[48, 64] and weight[32, 64] of case 0, 1 or 2.

    0: three large channels in every token; 1: the same in one token only, which dynamic scales
    absorb by themselves; 2: in every token, and hardly any output reads them.
    """
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(48, 64, generator=generator)
    weight = torch.randn(32, 64, generator=generator)
    x[: 1 if number == 1 else None, :3] *= 60.0
    if number == 2:
        weight[2:, :3] *= 0.03
    return x, weight


def alpha_error(x: Tensor, weight: Tensor, alpha: float) -> float:
    """Relative squared error of x W^T in W8A8 after SmoothQuant at `alpha`."""
    scale = smoothquant_scale(x.abs().amax(0), weight_absmax([weight]), alpha)
    return w8a8_error(x, [weight], scale)


def _of(x: Tensor, weight: Tensor, alpha: float) -> str:
    return f"{alpha_error(x, weight, alpha):.2g}"


def _numbers(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values.tolist()) + "]"

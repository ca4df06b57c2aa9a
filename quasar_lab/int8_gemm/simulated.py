"""W8A8 as transformers computes it: rounded, turned back into floats, multiplied as floats.

A checkpoint in the compressed-tensors format names the integers and scales of the weights; how
activations are rounded is up to whoever runs it. vLLM and the lab multiply integers, activations in
steps of absmax / 127. transformers has no INT8 product: it simulates one with the package
compressed-tensors, in steps of absmax / 127.5. There the largest value of a row lies half-way
between 127 and 128, so that the last bit of a float decides whether a negative one becomes -127 or
-128: only the same operations on the same floats give the same logits. These are the same.
"""

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor, nn

_STEPS = 127.5  # half of what lies between -128 and 127


def simulated_linear(
    x: Float[Tensor, "*rows K"],
    qweight: Int8[Tensor, "N K"],
    weight_scale: Float32[Tensor, "N"],
    bias: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "*rows N"]:
    """A W8A8 linear in x's dtype, bit for bit as transformers runs a W8A8 checkpoint.

    It widens the whole weight at each call: for comparing, not for speed.
    """
    scale = x.abs().amax(dim=-1, keepdim=True) / _STEPS
    scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    rounded = torch.clamp(torch.round(x / scale), -128, 127) * scale
    weight = qweight.to(x.dtype) * weight_scale[:, None].to(x.dtype)
    return nn.functional.linear(rounded, weight, bias)

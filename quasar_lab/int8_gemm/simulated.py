"""W8A8 as transformers computes it: rounded, turned back into floats, multiplied as floats.

A checkpoint in the compressed-tensors format names the integers and scales of the weights; how
activations are rounded is up to whoever runs it. vLLM and the lab multiply integers, activations in
steps of absmax / 127. transformers has no INT8 product: it simulates one with the package
compressed-tensors, in steps of absmax / 127.5. There the largest value of a row lies half-way
between 127 and 128, so that the last bit of a float decides whether a negative one becomes -127 or
-128: only the same operations on the same floats give the same logits. These are the same.
"""

import torch
from torch import Tensor, nn

from quasar_lab.int8_gemm import check_linear

_STEPS = 127.5  # half of what lies between -128 and 127


def simulated_linear(
    x: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """A W8A8 linear in x's dtype, bit for bit as transformers runs a W8A8 checkpoint.

    x[..., K], qweight int8[N, K], weight_scale float32[N], bias[N] or None -> x.dtype[..., N].
    It widens the whole weight at each call: for comparing, not for speed. Raises UserError as
    `w8a8_linear` does.
    """
    check_linear(x, qweight, weight_scale, bias)
    largest = x.abs().amax(dim=-1, keepdim=True)
    # by a tensor: CUDA turns the division by a number into a product with its reciprocal
    scale = largest / torch.full_like(largest, _STEPS)
    scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    rounded = torch.clamp(torch.round(x / scale), -128, 127) * scale
    weight = qweight.to(x.dtype) * weight_scale[:, None].to(x.dtype)
    return nn.functional.linear(rounded, weight, None if bias is None else bias.to(x.dtype))

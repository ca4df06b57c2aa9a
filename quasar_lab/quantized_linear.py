"""The W8A8 form of a linear layer."""

import torch
from jaxtyping import Float32, Int8
from torch import Tensor, nn

from quasar_lab import int8_gemm
from quasar_lab.checks import check_flag
from quasar_lab.int8_gemm.simulated import simulated_linear


class W8A8Linear(nn.Module):
    """y = x W^T + bias with INT8 weights and dynamically quantised INT8 activations.

    qweight: int8[N, K]; weight_scale: fp32[N], which stays fp32 whatever the model is cast to
    (a bf16 scale would be off by up to 0.4 %); bias: [N] or None, in the model's dtype.
    backend: as for `w8a8_linear`; simulated: compute by `simulated_linear` instead.
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
        simulated: bool = False,
        smoothing: str = "none",
    ) -> None:
        super().__init__()
        self.register_buffer("qweight", qweight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        check_flag("simulated", simulated)
        self.backend = backend
        self.simulated = simulated
        self.smoothing = smoothing

    @property
    def in_features(self) -> int:
        return self.qweight.shape[1]

    @property
    def out_features(self) -> int:
        return self.qweight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> [..., N] in x's dtype."""
        if self.simulated:
            return simulated_linear(x, self.qweight, self.weight_scale, self.bias)
        return int8_gemm.w8a8_linear(
            x, self.qweight, self.weight_scale, self.bias, backend=self.backend
        )

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        scale = self.weight_scale
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != torch.float32:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        name = prefix + "weight_scale"
        if name in state_dict and state_dict[name].dtype != torch.float32:
            # load_state_dict(assign=True) takes the tensors as they are; `state_dict` is a copy
            state_dict[name] = state_dict[name].float()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        how = "simulated in floating point" if self.simulated else f"backend={self.backend}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, W8A8 (int8 weights per channel, int8 activations per "
            f"token), {how}, smoothing={self.smoothing}"
        )

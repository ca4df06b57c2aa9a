"""INT8 GEMM: one file a backend behind one function, all bit-identical in their int32 sums.

A backend is a module with `availability()` ("ok" or why not), `supports(device)`,
`int8_matmul(a, b)` and `w8a8_linear(x, qweight, weight_scale, bias)`.
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from quasar_lab.errors import UserError
from quasar_lab.int8_gemm import choice
from quasar_lab.int8_gemm.reference import MAX_K, quantize_activation, quantize_weight

__all__ = [
    "available_backends",
    "int8_matmul",
    "quantize_activation",
    "quantize_weight",
    "w8a8_linear",
]

# In the order of preference where nothing is measured.
_BACKENDS = {
    "triton": "triton_backend",
    "cpu": "cpu",
    "int_mm": "int_mm",
    "reference": "reference",
}


def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"quasar_lab.int8_gemm.{_BACKENDS[name]}")


def available_backends() -> dict[str, str]:
    """Each backend's name -> "ok", or one line on why it does not work on this machine."""
    return {name: _backend(name).availability() for name in _BACKENDS}


@functools.cache
def _usable(device: torch.device) -> dict[str, ModuleType]:
    modules = {name: _backend(name) for name in _BACKENDS}
    return {
        name: module
        for name, module in modules.items()
        if module.availability() == "ok" and module.supports(device)
    }


def _choose(backend: str, rows: int, weight: Tensor) -> ModuleType:
    """The backend's module, from memory if it was asked for before: a linear asks at every step."""
    key = (backend, rows, weight.shape, weight.device, torch.get_num_threads())
    module = choice.chosen.get(key)
    if module is None:
        module = choice.chosen[key] = _find(backend, rows, weight)
    return module


def _find(backend: str, rows: int, weight: Tensor) -> ModuleType:
    if backend == "auto":
        usable = _usable(weight.device)
        return usable[choice.fastest(usable, rows, weight)]
    if backend not in _BACKENDS:
        raise UserError(
            f"unknown INT8 backend {backend!r}: choose 'auto' or one of {', '.join(_BACKENDS)}"
        )
    module = _backend(backend)
    if (reason := module.availability()) != "ok":
        raise UserError(f"INT8 backend {backend!r} does not work here: {reason}")
    if not module.supports(weight.device):
        raise UserError(
            f"INT8 backend {backend!r} does not run on device {str(weight.device)!r}: "
            "use backend='auto' or move the tensors"
        )
    return module


def _check(name: str, tensor: object, dtypes: tuple[torch.dtype, ...], ndim: int | None) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UserError(f"{name} is {found}: it must be a tensor of {allowed}")
    if tensor.ndim != (ndim or tensor.ndim) or tensor.ndim == 0:
        raise UserError(f"{name} has shape {list(tensor.shape)}: it must have {ndim} dimensions")


def _check_inner(a: Tensor, b: Tensor, names: str) -> None:
    if a.shape[-1] != b.shape[-1]:
        raise UserError(
            f"{names} have shapes {list(a.shape)} and {list(b.shape)}: "
            "their last dimensions (K) must be equal"
        )
    if not 1 <= a.shape[-1] <= MAX_K:
        raise UserError(
            f"{names} have K = {a.shape[-1]}: from 1 to {MAX_K}, which no int32 sum can overflow"
        )
    if a.device != b.device:
        raise UserError(f"{names} are on {a.device} and {b.device}: move them to one device")


def int8_matmul(a: Tensor, b: Tensor, *, backend: str = "auto") -> Tensor:
    """a @ b.T with exact integer sums: int8[M, K], int8[N, K] -> int32[M, N].

    backend: "auto" (the fastest here) or a name of `available_backends()`. Raises UserError for
    wrong dtypes or shapes and for a backend that does not work here.
    """
    _check("a", a, (torch.int8,), 2)
    _check("b", b, (torch.int8,), 2)
    _check_inner(a, b, "a and b")
    return _choose(backend, a.shape[0], b).int8_matmul(a, b)


def check_linear(
    x: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> None:
    """UserError unless these are the operands of a W8A8 linear, see `w8a8_linear`."""
    _check("x", x, (torch.float16, torch.bfloat16, torch.float32, torch.float64), None)
    _check("qweight", qweight, (torch.int8,), 2)
    _check("weight_scale", weight_scale, (torch.float32,), 1)
    _check_inner(x, qweight, "x and qweight")
    for name, vector in (("weight_scale", weight_scale), ("bias", bias)):
        if vector is not None and vector.shape != qweight.shape[:1]:
            raise UserError(
                f"{name} has shape {list(vector.shape)}: qweight needs [{qweight.shape[0]}]"
            )


def w8a8_linear(
    x: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """A linear layer with INT8 weights and INT8 activations, quantised on the fly per token.

    x[..., K] (float16, bfloat16, float32 or float64), qweight int8[N, K], weight_scale
    float32[N], bias[N] or None -> x.dtype[..., N]:
    y[m, n] = sum_k qx[m, k] qw[n, k] * sx[m] * sw[n] + bias[n], the sum exact in int32, the rest
    in float32 (for float64, in float64). Raises UserError as `int8_matmul` does.
    """
    check_linear(x, qweight, weight_scale, bias)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    module = _choose(backend, rows.shape[0], qweight)
    out = module.w8a8_linear(rows, qweight, weight_scale, bias)
    return out if x.ndim == 2 else out.view(*x.shape[:-1], -1)

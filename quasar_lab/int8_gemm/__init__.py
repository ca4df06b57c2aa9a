"""INT8 GEMM: one file a backend behind one function, all bit-identical in their int32 sums."""

from quasar_lab.int8_gemm.reference import quantize_activation, quantize_weight

__all__ = ["quantize_activation", "quantize_weight"]

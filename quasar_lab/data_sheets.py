"""Named chips, as their makers describe them: what a cost model can start from.

Peak rates of dense products, without structured sparsity, and the bandwidth of the memory; 1e12
operations and 1e9 bytes. Kernels reach a part of both. NVIDIA's data sheets of A100 80 GB SXM, H100
SXM, H200 SXM and L4, and its architecture papers for the GeForce cards (bf16 with fp32
accumulation); the sheets of Hopper and L4 print twice these rates, for sparse products. The
Ascend 910B2 of the paper is not here: its maker publishes no sheet, and what others state for its
memory differs by a factor of four.
"""

from collections.abc import Mapping
from types import MappingProxyType

from quasar_lab.cost_model import Machine, own_machine

# name: GB/s, INT8 and bf16 in 1e12 operations a second
_SHEETS = {
    "H200 SXM": (4800, 1979, 989),
    "H100 SXM": (3350, 1979, 989),
    "A100 80 GB SXM": (2039, 624, 312),
    "RTX 4090": (1008, 660.6, 165.2),
    "RTX 3090": (936, 284, 71),
    "L4": (300, 242, 121),
}

DATA_SHEETS: Mapping[str, Machine] = MappingProxyType(
    {
        name: own_machine(bandwidth, {"INT8": int8, "bf16": bf16}, name=name)
        for name, (bandwidth, int8, bf16) in _SHEETS.items()
    }
)

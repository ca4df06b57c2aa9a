"""What the compiled decoder step (`fused_cpu`) is made of, from the whole to its innermost loops.

`step`: the step and its stages; `rows`: arithmetic on rows; `linear_tile`, `mix_tile`: tiles of
products in registers; `emitter`: how those are written in LLVM's language; `barrier`: how the
threads wait for each other.
"""

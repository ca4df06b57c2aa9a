"""What the compiled decoder step (`fused_cpu`) is made of.

`step`: the step and its stages; `rows`: arithmetic on rows; `barrier`: how the threads wait for
each other. The matrix products are those of `tiles`.
"""

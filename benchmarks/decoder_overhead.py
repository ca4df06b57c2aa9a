"""What a decoder step costs beside its multiplications, and with them.

    python benchmarks/decoder_overhead.py [--tokens 1 4 6 8] [--context 200] [--repeats 200]

For each engine and precision: the whole step, and the step with every matrix multiplication left
out ("overhead": embedding, norms, quantisation, rotation, cache, attention, SwiGLU, threads).
"W8A8 head" has its output layer in INT8 as well. Times in milliseconds; the minimum is what the
machine can do, the median what it did. The target: at most 4 ms of overhead for six tokens.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from quasar_lab import QuantizationConfig, load, quantize
from quasar_lab.decoder import FastDecoder
from quasar_lab.decoder_weights import Matrix


@contextmanager
def no_multiplications(decoder: FastDecoder) -> Iterator[None]:
    """Both engines go through all their motions, but no matrix is multiplied.

    The torch engine gets zeros of the right shape; the compiled step reads that every matrix has
    no rows (it works on what is in its output buffers, which the step before has filled).
    """
    call = Matrix.__call__
    Matrix.__call__ = lambda matrix, x: x.new_zeros(len(x), len(matrix.weight))
    records = []
    if decoder._fused is not None:
        projections = [decoder._fused._layers[name] for name in ("qkv", "o", "gate_up", "down")]
        records = [each["matrices"]["n"] for each in [*projections, decoder._fused.step["head"]]]
    saved = [record.copy() for record in records]
    try:
        for record in records:
            record[...] = 0
        yield
    finally:
        Matrix.__call__ = call
        for record, values in zip(records, saved, strict=True):
            record[...] = values


def milliseconds(decoder: FastDecoder, tokens: int, repeats: int) -> tuple[float, float]:
    """(minimum, median) of one forward of so many tokens and its rollback."""
    ids = torch.arange(1000, 1000 + tokens)
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        decoder.forward(ids)
        times.append(1000 * (time.perf_counter() - start))
        decoder.rollback(tokens)
    return min(times[3:]), float(np.median(times[3:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 6, 8])
    parser.add_argument("--context", type=int, default=200, help="tokens in the cache (200)")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--engines", nargs="+", default=["fused", "torch"])
    parser.add_argument("--precisions", nargs="+", default=["float32", "W8A8", "W8A8 head"])
    arguments = parser.parse_args()

    model = load().model

    def quantized(*skip: str) -> object:
        return quantize(model, config=QuantizationConfig(smoothing="none", skip=skip))

    models = {
        "float32": lambda: model,
        "W8A8": lambda: quantized("lm_head"),
        "W8A8 head": quantized,
    }
    print("engine precision   M   overhead (min, median)   step (min, median), ms")
    for precision in arguments.precisions:
        prepared = models[precision]()
        for engine in arguments.engines:
            decoder = FastDecoder.from_model(prepared, engine=engine)
            decoder.forward(torch.arange(arguments.context))
            for tokens in arguments.tokens:
                whole = milliseconds(decoder, tokens, arguments.repeats)
                with no_multiplications(decoder):
                    overhead = milliseconds(decoder, tokens, arguments.repeats)
                print(
                    f"{engine:6} {precision:9} {tokens:3}   {overhead[0]:8.2f} {overhead[1]:8.2f}"
                    f"        {whole[0]:8.2f} {whole[1]:8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

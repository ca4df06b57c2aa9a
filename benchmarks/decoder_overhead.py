"""What a decoder step costs beside its multiplications, and with them.

    python benchmarks/decoder_overhead.py [--tokens 1 4 6 8] [--context 200] [--repeats 60]

For each engine and precision, in turns: the whole step, and the step with every matrix
multiplication left out ("overhead": embedding, norms, quantisation, rotation, cache, attention,
SwiGLU, threads).
"W8A8 bf16" has bfloat16 for all that is not INT8, as the paper has; "W8A8 head" has its
output layer in INT8 as well. Times in milliseconds; the minimum is what the machine can do, the
median what it did. The target: at most 4 ms of overhead for six tokens.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from quasar_lab import QuantizationConfig, load, quantize
from quasar_lab.decoder import FastDecoder
from quasar_lab.decoder_weights import Matrix
from quasar_lab.errors import UserError
from quasar_lab.structure import in_bfloat16

ENGINES = ["fused", "torch"]
PRECISIONS = ["float32", "bfloat16", "W8A8", "W8A8 bf16", "W8A8 head"]


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


def milliseconds(decoder: FastDecoder, tokens: int) -> float:
    """One forward of so many tokens; its rollback is not timed."""
    ids = torch.arange(1000, 1000 + tokens)
    start = time.perf_counter()
    decoder.forward(ids)
    passed = 1000 * (time.perf_counter() - start)
    decoder.rollback(tokens)
    return passed


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number, 1 or more")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 4, 6, 8])
    parser.add_argument("--context", type=positive, default=200, help="tokens in the cache (200)")
    parser.add_argument("--repeats", type=positive, default=60)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    arguments = parser.parse_args()

    model = load().model
    decoders = {}
    for precision in arguments.precisions:
        prepared = in_bfloat16(model) if "bf" in precision else model
        if "W8A8" in precision:
            skip = () if "head" in precision else ("lm_head",)
            prepared = quantize(prepared, config=QuantizationConfig(smoothing="none", skip=skip))
        for engine in arguments.engines:
            decoder = FastDecoder.from_model(prepared, engine=engine)
            decoder.forward(torch.arange(arguments.context))
            decoders[engine, precision] = decoder
    print("engine precision   M   overhead (min, median)   step (min, median), ms")
    for tokens in arguments.tokens:
        whole, overhead = ({key: [] for key in decoders} for _ in range(2))
        for _ in range(arguments.repeats + 3):
            for key, decoder in decoders.items():
                whole[key].append(milliseconds(decoder, tokens))
                with no_multiplications(decoder):
                    overhead[key].append(milliseconds(decoder, tokens))
        for engine, precision in decoders:
            figures = [
                f"{min(times):8.2f} {np.median(times):8.2f}"
                for times in (each[engine, precision][3:] for each in (overhead, whole))
            ]
            print(f"{engine:6} {precision:9} {tokens:3}   {'        '.join(figures)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"decoder_overhead: error: {error}", file=sys.stderr)
        sys.exit(2)

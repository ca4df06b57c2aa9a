"""Prove on the model itself that a smoothing group is right.

Smoothing is exact only if *everything* that reads the source is listed and nothing non-linear lies
between. Instead of trusting names, scale by powers of two, which is exact in floating point: the
logits must stay the same bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quasar_lab.architectures import SmoothingGroup


@contextmanager
def virtual_scales(
    model: nn.Module, scales: Sequence[tuple[SmoothingGroup, Tensor]]
) -> Iterator[None]:
    """Smooth `model` without touching a weight, by hooks: outputs of each source / s, inputs of
    each reader * s. The scales are in source channels, Tensor[width].
    """
    handles = []

    def divide(module: nn.Module, args: object, output: Tensor, s: Tensor) -> Tensor:
        rest = output.shape[-1] - len(s)
        return output / torch.cat([output.new_ones(rest), s.to(output)])

    def multiply(module: nn.Module, args: tuple, kwargs: dict, s: Tensor) -> tuple[tuple, dict]:
        if args:
            return (args[0] * s.to(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: kwargs[first] * s.to(kwargs[first])}

    try:
        for group, s in scales:
            source = model.get_submodule(group.source)
            handles.append(
                source.register_forward_hook(lambda m, a, out, s=s: divide(m, a, out, s))
            )
            wide = group.expand(s)
            for reader in group.readers:
                handles.append(
                    model.get_submodule(reader).register_forward_pre_hook(
                        lambda m, a, k, s=wide: multiply(m, a, k, s), with_kwargs=True
                    )
                )
        yield
    finally:
        for handle in handles:
            handle.remove()


def wrong_groups(model: nn.Module, groups: Sequence[SmoothingGroup]) -> list[SmoothingGroup]:
    """The groups that would change the model's function, found by running it on a few tokens.

    Powers of two scale floats exactly, so with the right groups the logits stay the same bit for
    bit; an output that something else reads as well, or a non-linear step between, shows.
    """
    generator = torch.Generator().manual_seed(0)
    parameter = next(model.parameters())
    ids = torch.arange(1, 6, device=parameter.device)[None]

    def logits(tested: Sequence[SmoothingGroup]) -> Tensor:
        scales = [
            (group, 2.0 ** torch.randint(-2, 3, (group.width,), generator=generator))
            for group in tested
        ]
        with torch.no_grad(), virtual_scales(model, scales):
            return model(input_ids=ids, use_cache=False).logits

    def search(suspects: Sequence[SmoothingGroup]) -> list[SmoothingGroup]:
        if not suspects or torch.equal(logits(suspects), reference):
            return []
        if len(suspects) == 1:
            return list(suspects)
        middle = len(suspects) // 2
        return search(suspects[:middle]) + search(suspects[middle:])

    reference = logits([])
    return search(groups)

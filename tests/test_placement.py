"""Memory in large pages: what is asked for is what is there, and it leaves with its tensors."""

import gc
import weakref

import torch

from quasar_lab import placement
from quasar_lab.placement import is_placed, reserve


def test_tensors_lie_apart_on_cache_lines():
    """A wrong offset would let one weight matrix overwrite the next."""
    kinds = [
        ((3, 5), torch.float32),
        ((7,), torch.int8),
        ((0, 4), torch.float64),
        ((2, 2), torch.bfloat16),
    ]
    tensors = reserve(*kinds)
    for value, (tensor, (shape, dtype)) in enumerate(zip(tensors, kinds, strict=True)):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.data_ptr() % 64 == 0
        assert is_placed(tensor)
        tensor.fill_(value)
    for value, tensor in enumerate(tensors):
        assert (tensor == value).all()


def test_the_memory_is_no_larger_than_its_content():
    """torch.save and deepcopy write whole storages: 2 MB of padding a layer would all be saved."""
    (tensor,) = reserve(((1000,), torch.float32))
    assert tensor.untyped_storage().nbytes() <= 4000 + 128


def test_memory_goes_with_its_last_tensor():
    """A register that holds on to mappings would keep every model ever loaded."""
    (tensor,) = reserve(((10,), torch.float32))
    view, mapping = tensor[3:], weakref.ref(placement._mappings[tensor.data_ptr()])
    del tensor
    gc.collect()
    assert is_placed(view) and mapping() is not None
    del view
    gc.collect()
    assert mapping() is None


def test_other_tensors_are_not_placed():
    """Then nothing would ever be moved."""
    assert not is_placed(torch.zeros(4))
    assert reserve() == []

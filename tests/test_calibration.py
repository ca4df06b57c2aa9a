"""Calibration: right statistics, for every family, whatever form the batches have."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import FAMILIES, VOCAB, tiny_model
from transformers import BatchEncoding

from quasar_lab import ActivationStats, UserError, calibrate
from quasar_lab.activation_stats import SPREAD_SAMPLE_ROWS
from quasar_lab.calibration import CalibrationStats, observe
from quasar_lab.structure import linear_layers


def token_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(a: ActivationStats, b: ActivationStats, *, rtol: float = 0.0) -> None:
    for field in (
        *("min", "max", "absmax", "center_absmax", "threshold", "sigma"),
        *("sample", "spread_sample"),
    ):
        torch.testing.assert_close(getattr(a, field), getattr(b, field), rtol=rtol, atol=rtol)
    assert a.num_tokens == b.num_tokens


def num_hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


# --- the statistics themselves -----------------------------------------------------------------


def test_statistics_of_several_batches():
    """Guards streaming: ranges over all batches, sigma the largest of any, X0 the first only."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 5, 3)), rng.normal(size=(4, 3)) * [9, 1, 1] + [0, 5, 0]
    third = second * 0.1  # within the range so far, and quieter
    stats = ActivationStats.from_batches([torch.tensor(b) for b in (first, second, third)])
    everything = np.concatenate([first.reshape(-1, 3), second, third])
    low, high = everything.min(0), everything.max(0)
    np.testing.assert_allclose(stats.absmax, np.abs(everything).max(0), rtol=1e-6)
    np.testing.assert_allclose(stats.center_absmax, (high - low) / 2, rtol=1e-6)
    assert float(stats.threshold) == pytest.approx(((high - low) / 2).max(), rel=1e-6)
    first = first.reshape(-1, 3)
    spreads = [
        (first - (first.max(0) + first.min(0)) / 2).std(ddof=1),
        (second - (high + low) / 2).std(ddof=1),
    ]
    assert float(stats.sigma) == pytest.approx(max(spreads), rel=1e-6)
    np.testing.assert_allclose(stats.sample, first, rtol=1e-6)
    assert stats.num_tokens == 18


def test_the_spread_sample_is_even():
    """Guards the rows on which scales are judged: from all batches alike, the same every time."""
    batches = [torch.full((50, 1), float(index)) for index in range(40)]
    stats = ActivationStats.from_batches(batches)
    rows = stats.spread_sample.flatten()
    assert len(rows) == SPREAD_SAMPLE_ROWS == 128
    # of 128 rows out of 40 batches 64 are expected in each half, with a deviation of 5.5
    assert abs(int((rows < 20).sum()) - 64) < 5 * 5.5
    assert len(rows.unique()) > 30  # 38.4 +- 1.2 of 40 batches are expected
    assert torch.equal(rows, ActivationStats.from_batches(batches).spread_sample.flatten())
    assert len(ActivationStats.from_batches(batches[:1]).spread_sample) == 50


def test_the_sample_is_a_copy():
    """Guards against statistics that change when the caller reuses the batch's memory."""
    x = torch.ones(4, 3)
    stats = ActivationStats.from_batches([x])
    x.zero_()
    assert (stats.sample == 1).all() and (stats.max == 1).all()


def test_one_token_has_no_spread():
    """Guards against a NaN from the unbiased deviation of a single value."""
    stats = ActivationStats.from_batches([torch.tensor([[2.0]])])
    assert float(stats.sigma) == 0


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batches"),
        ([torch.zeros(0, 3)], "no tokens"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "4 channels, earlier batches had 3"),
        ([torch.tensor(1.0)], r"pass tensors \[\.\.\., channels\]"),
        ([torch.tensor([[1.0, torch.nan]])], "batch 0: NaN or Inf"),
        ([torch.ones(1, 2), torch.tensor([[1.0, -torch.inf]])], "batch 1: NaN or Inf"),
    ],
)
def test_bad_batches_of_activations(batches, message):
    """Guards against silent garbage: one line that says which batch is wrong."""
    with pytest.raises(UserError, match=message):
        ActivationStats.from_batches(batches)


# --- running a model ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_of_every_family(family):
    """Guards the observers: each linear's statistics are those of what it really read."""
    model = tiny_model(family)
    batches = [token_ids(7), token_ids(2, 5, seed=1)]
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in linear_layers(model)}
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, name=name: seen[name].append(args[0].clone())
        )
        for name, module in linear_layers(model).items()
    ]
    for ids in batches:
        model(ids.view(-1, ids.shape[-1]))
    for handle in handles:
        handle.remove()

    stats = calibrate(model, batches, max_sample_tokens=None)
    assert set(stats) == set(seen)
    assert (stats.num_batches, stats.num_tokens) == (2, 17)
    for name, inputs in seen.items():
        assert_same(stats[name], ActivationStats.from_batches(inputs), rtol=1e-6)


def test_linears_that_share_an_input_share_the_statistics(tiny_llama):
    """Guards memory: one object (and one sample) for q, k, v and one for gate, up."""
    stats = calibrate(tiny_llama, [token_ids(9), token_ids(4)])
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    assert stats[attention + "q_proj"] is stats[attention + "v_proj"]
    assert stats[mlp + "gate_proj"] is stats[mlp + "up_proj"]
    assert stats[mlp + "gate_proj"] is not stats[mlp + "down_proj"]
    # four inputs a layer and the output layer's
    assert len({id(s) for s in stats.values()}) == 4 * 3 + 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_unpadded(family, side):
    """Case 28: padding changes neither the statistics nor (by its positions) the activations."""
    model = tiny_model(family)
    texts = [token_ids(4), token_ids(9, seed=1), token_ids(6, seed=2)]
    ids, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(9 - len(text), 9) if side == "left" else slice(0, len(text))
        ids[row, place], mask[row, place] = text, 1
    plain = calibrate(model, texts)
    for batch in ({"input_ids": ids, "attention_mask": mask}, (ids, mask)):
        padded = calibrate(model, [batch])
        for name in plain:
            assert_same(padded[name], plain[name])
        assert padded.num_tokens == plain.num_tokens == 19


def test_forms_of_a_batch(tiny_llama):
    """Guards the accepted forms: vector, matrix, dict, tokenizer output, pair, a generator."""
    ids = token_ids(6)
    expected = calibrate(tiny_llama, [ids])
    mask = torch.ones(1, 6, dtype=torch.long)
    forms = [
        ids[None],
        ids.int(),
        {"input_ids": ids[None]},
        BatchEncoding({"input_ids": ids[None], "attention_mask": mask}),
        (ids[None], mask),
    ]
    for form in forms:
        stats = calibrate(tiny_llama, (batch for batch in [form]))
        assert_same(stats["lm_head"], expected["lm_head"])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "calibration set is empty"),
        ([torch.ones(2, 3, 4, dtype=torch.long)], r"batch 0 has shape \[2, 3, 4\]"),
        ([token_ids(3), torch.ones(0, dtype=torch.long)], r"batch 1 has shape \[0\]"),
        ([torch.ones(4)], "batch 0 is a float32 tensor"),
        (["some text"], "batch 0 is a str"),
        ([{"ids": token_ids(3)}], "no 'input_ids'"),
        ([torch.tensor([1, VOCAB])], f"token id {VOCAB}, the model's ids go from 0 to {VOCAB - 1}"),
        ([torch.tensor([1, -100])], "token id -100"),
        ([(token_ids(2, 3), torch.ones(3))], "attention mask must be a tensor of shape"),
        ([(token_ids(2, 3), torch.tensor([[1, 1, 1], [0, 0, 0]]))], "all padding"),
        ([token_ids(600)], "600 tokens, the model takes 512"),
    ],
)
def test_bad_batches_of_tokens(tiny_llama, batches, message):
    """Guards against crashes deep in the model: one line that names the batch; no hook stays."""
    with pytest.raises(UserError, match=message):
        calibrate(tiny_llama, batches)
    assert num_hooks(tiny_llama) == 0


def test_nan_names_linear_and_batch(tiny_llama):
    """Guards against statistics of NaN: the first linear that reads one is named."""
    model = copy.deepcopy(tiny_llama)
    model.model.layers[1].self_attn.o_proj.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.gate_proj, batch 0: NaN or Inf"):
        calibrate(model, [token_ids(4)])
    model = copy.deepcopy(tiny_llama)
    model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight.clone())
    model.model.embed_tokens.weight.data[90] = torch.inf
    batches = [torch.tensor([5, 6]), torch.tensor([5, 90])]
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj, batch 1: NaN or Inf"):
        calibrate(model, batches)
    assert num_hooks(model) == 0


def test_a_linear_that_never_ran(tiny_llama):
    """Guards against a hole that shows up only while quantising."""
    model = copy.deepcopy(tiny_llama)
    model.model.layers[0].mlp.spare_proj = torch.nn.Linear(4, 4)
    with pytest.raises(UserError, match=r"never ran on 4 tokens: \S+spare_proj"):
        calibrate(model, [token_ids(4)])
    assert "lm_head" in calibrate(model, [token_ids(4)], ignore="*.spare_proj")


def test_hooks_are_removed_on_any_exception(tiny_llama):
    """Guards against observers that stay: later runs would be slower and leak memory."""
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), observe(tiny_llama):
            assert num_hooks(tiny_llama) == len(linear_layers(tiny_llama))
            raise error
        assert num_hooks(tiny_llama) == 0
    with (
        pytest.raises(UserError, match="no linear named 'nowhere'"),
        observe(tiny_llama, ["nowhere"]),
    ):
        pass
    assert num_hooks(tiny_llama) == 0


def test_the_model_is_left_as_it_was():
    """Guards against side effects: mode, weights and the global generator are untouched."""
    model = tiny_model("gpt2").train()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    a, b = calibrate(model, [token_ids(8)]), calibrate(model, [token_ids(8)])
    assert torch.equal(torch.rand(1), expected)
    assert model.training
    assert model(token_ids(1, 8)).logits.shape == (1, 8, VOCAB)  # the output layer computes again
    assert_same(a["lm_head"], b["lm_head"])  # dropout was off
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_memory_does_not_grow_with_the_text(tiny_llama):
    """Guards O(channels): after 40 more batches the statistics hold as many numbers."""

    def size(stats: CalibrationStats) -> int:
        distinct = {id(s): s for s in stats.values()}.values()
        return sum(
            s.min.numel() + s.max.numel() + s.sample.numel() + s.spread_sample.numel()
            for s in distinct
        )

    batches = [token_ids(50, seed=seed) for seed in range(41)]
    short = calibrate(tiny_llama, batches[:3], max_sample_tokens=16)
    long = calibrate(tiny_llama, batches, max_sample_tokens=16)
    assert size(short) == size(long)
    assert len(long["lm_head"].sample) == 16
    assert sum(map(len, long.sequences)) == 41 * 50


def test_save_and_load(tiny_llama, tmp_path):
    """Guards the file: everything comes back, shared statistics shared, and stored once."""
    stats = calibrate(tiny_llama, [token_ids(12), token_ids(2, 5)])
    path = tmp_path / "stats.safetensors"
    stats.save(path)
    again = CalibrationStats.load(path)
    assert list(again) == list(stats)
    for name in stats:
        assert_same(again[name], stats[name])
    assert again["lm_head"].sigma.shape == ()
    q, v = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
    assert again[q] is again[v]
    assert repr(again) == repr(stats) and "22 linears of LlamaForCausalLM" in repr(stats)
    assert [s.tolist() for s in again.sequences] == [s.tolist() for s in stats.sequences]
    assert [p.name for p in tmp_path.iterdir()] == ["stats.safetensors"]


def test_loading_something_else(tmp_path):
    """Guards against tracebacks: a missing or foreign file is one line."""
    with pytest.raises(UserError, match="cannot read calibration statistics"):
        CalibrationStats.load(tmp_path / "missing")
    (tmp_path / "text").write_text("hello, this is no safetensors file")
    with pytest.raises(UserError, match="cannot read calibration statistics"):
        CalibrationStats.load(tmp_path / "text")
    save_file({"min": torch.zeros(2)}, tmp_path / "other", {"format": "quasar-lab calibration 1"})
    with pytest.raises(UserError, match="or some of another version"):
        CalibrationStats.load(tmp_path / "other")


def test_a_file_without_its_parts_is_told(tiny_llama, tmp_path):
    """Guards the metadata: another program may have rewritten the file, or saved none of it."""
    stats = calibrate(tiny_llama, [token_ids(12)])
    stats.save(tmp_path / "new" / "stats")
    assert list(CalibrationStats.load(tmp_path / "new" / "stats")) == list(stats)
    form = {"format": "quasar-lab calibration 2"}
    save_file({"min": torch.zeros(2)}, tmp_path / "bare", form)
    groups = {"group_tokens": "[3]", "group_of_linear": "{}"}
    save_file({"min": torch.zeros(2)}, tmp_path / "empty", form | groups)
    save_file({"min": torch.zeros(2)}, tmp_path / "garbled", form | {"group_tokens": "3, ["})
    for name in ("bare", "empty", "garbled"):
        with pytest.raises(UserError, match="lacks a part"):
            CalibrationStats.load(tmp_path / name)
    save_file({"min": torch.zeros(2)}, tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no calibration statistics"):
        CalibrationStats.load(tmp_path / "nothing")
    before = sorted(tmp_path.iterdir())
    for place in (tmp_path / "new", tmp_path / "bare" / "stats"):  # a folder; below a file
        with pytest.raises(UserError, match="cannot write") as error:
            stats.save(place)
        assert "\n" not in str(error.value)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("batches", [{"input_ids": token_ids(4)}, "text", None])
def test_a_bare_batch_is_told(tiny_llama, batches):
    """Guards a common slip: one tokenizer output is no list of batches."""
    with pytest.raises(UserError, match=r"batches is .*list of batches"):
        calibrate(tiny_llama, batches)


def test_the_model_itself_is_asked_for(tiny_llama):
    """Guards a common slip: what load() returned is understood, a name is refused."""
    loaded = SimpleNamespace(model=tiny_llama, tokenizer=None)
    assert_same(
        calibrate(loaded, [token_ids(4)])["lm_head"],
        calibrate(tiny_llama, [token_ids(4)])["lm_head"],
    )
    with pytest.raises(UserError, match=r"model is a str: pass a torch module or what load\(\)"):
        calibrate("tiny", [token_ids(4)])

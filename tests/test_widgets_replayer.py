"""The step replayer: every step told, nothing unescaped, and readable without a kernel."""

import re
import threading

import pytest
import torch

from quasar_lab import Draft, NGramDrafter, SamplingConfig, UserError, generate, reprice
from quasar_lab.widgets.panel import Panel
from quasar_lab.widgets.replayer import Replayer, replay_html


class Letters:
    """A tokenizer whose tokens would break a page that does not escape them."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<b>&{token}\n" if token % 2 else f' "t{token}' for token in ids)


PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def trace(tiny_llama):
    """Sampled, with accepted, rejected and untested drafts."""
    return generate(
        tiny_llama, PROMPT, drafter=Shuffled(),
        sampling=SamplingConfig(temperature=1.0, seed=3), max_new_tokens=24, eos_token_id=[],
    ).trace  # fmt: skip


class Shuffled:
    """Proposes uniformly drawn tokens of known q: many rejections."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def reset(self, prompt_ids) -> None: ...

    def extend(self, tokens) -> None: ...

    def propose(self, max_tokens: int):
        count = min(max_tokens, 3)
        tokens = torch.randint(97, (count,), generator=self.generator)
        return Draft(tokens, torch.full((count, 97), 1 / 97, dtype=torch.float64))


def text_of(markup: str) -> str:
    return re.sub(r"<[^>]*>", "", markup)


def test_a_step_shows_p_q_and_u_of_every_token(trace) -> None:
    for number, step in enumerate(trace.steps, start=1):
        page = replay_html(trace, Letters(), number, all_steps=False)
        for row in step.rows():
            if row["uniform"] is not None and row["kind"] != "bonus":
                assert f"p {row['p']:.3f}" in page or f"p {row['p']:.0e}" in page
                assert f"u {row['uniform']:.3f}" in page
        assert f"Step {number} of {len(trace.steps)}" in page
        if step.outcome == "replacement":
            assert f"{step.verification.residual_mass:.3f} of p" in page


def test_all_kinds_have_a_sign_besides_the_colour(trace) -> None:
    kinds = {row["kind"] for step in trace.steps for row in step.rows()}
    assert {"accepted", "rejected", "untested", "replacement"} <= kinds
    page = replay_html(trace, Letters(), len(trace.steps))
    for sign in "✓✗·↻+○":
        assert f"<sup>{sign}</sup>" in page


def test_text_is_escaped_everywhere(trace) -> None:
    """A token such as <script> must be shown, not run."""
    for number in range(1, len(trace.steps) + 1):
        page = replay_html(trace, Letters(), number)
        assert "<b>&" not in page and ' "t' not in text_of(page).replace("&quot;", "'")
        assert re.search(r"&lt;b&gt;&amp;\d+", page)


def test_the_static_table_holds_every_step(trace) -> None:
    """A saved page has no kernel: the table must tell all that the slider would."""
    page = replay_html(trace, Letters(), 1)
    assert f"<details><summary>All {len(trace.steps)} steps as a table</summary>" in page
    table = page[page.index("<details>") :]
    num_rows = sum(len(list(step.rows())) for step in trace.steps)
    assert table.count("<tr>") == num_rows + 1
    assert "<details>" not in replay_html(trace, Letters(), 1, all_steps=False)
    assert "<script" not in page


def test_the_text_grows_with_the_steps(trace) -> None:
    """Only what was emitted may stand in the text before the current step."""
    page = replay_html(trace, Letters(), len(trace.steps), all_steps=False)
    text = page[page.index("pre-wrap; line-height") : page.index('<span style="outline')]
    emitted = [token for step in trace.steps[:-1] for token in step.tokens]
    assert text.count("title=") == len(emitted)


@pytest.mark.parametrize("drafter", [None, NGramDrafter()])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_and_greedy_traces_replay_too(tiny_llama, drafter, temperature: float) -> None:
    generation = generate(
        tiny_llama, PROMPT, drafter=drafter, max_new_tokens=8, eos_token_id=[],
        sampling=SamplingConfig(temperature=temperature, seed=1),
    )  # fmt: skip
    pages = [
        replay_html(generation, Letters(), number) for number in range(1, len(generation.steps) + 1)
    ]
    if drafter is None:
        assert "one token of plain decoding" in pages[0]
    assert ("the most likely token" in pages[0]) == (temperature == 0)


def test_a_repriced_trace_has_no_times_to_show(tiny_llama) -> None:
    generation = generate(tiny_llama, PROMPT, max_new_tokens=4, eos_token_id=[])
    page = replay_html(reprice(generation, NGramDrafter()), Letters(), 1)
    assert "nan" not in page and "ms" not in text_of(page)


def test_an_end_in_the_middle_of_a_draft(tiny_llama) -> None:
    """Drafts behind the end of the output are marked as such and are no part of the text."""
    plain = generate(tiny_llama, PROMPT, max_new_tokens=6, eos_token_id=[]).tokens

    class Oracle(Shuffled):
        def propose(self, max_tokens: int):
            return Draft(plain[:5][:max_tokens])

    cut = generate(tiny_llama, PROMPT, drafter=Oracle(), max_new_tokens=20, eos_token_id=[plain[1]])
    page = replay_html(cut, Letters(), len(cut.steps))
    assert "then the output was at its end" in page and "behind the end of the output" in page


@pytest.mark.parametrize("step", [0, 999, 1.5, None])
def test_a_step_that_is_not_there(trace, step) -> None:
    with pytest.raises(UserError, match="choose 1 to"):
        replay_html(trace, Letters(), step)


def test_nothing_to_replay(tiny_llama) -> None:
    with pytest.raises(UserError, match="no steps to replay"):
        Replayer(generate(tiny_llama, PROMPT, max_new_tokens=0), Letters())
    with pytest.raises(UserError, match="not a list"):
        Replayer([1, 2], Letters())


def test_slider_and_buttons_step(trace) -> None:
    panel = Replayer(trace, Letters())
    try:
        assert "Step 1 of" in panel.output.value  # drawn before anything is touched
        panel.slider.value = 3
        panel.flush()
        assert "Step 3 of" in panel.output.value and "step 3 of" in panel.state.value
        for name, expected in (("Next", 4), ("Prev", 3), ("Last", len(trace.steps)), ("First", 1)):
            panel.buttons[name].click()
            panel.flush()
            assert f"Step {expected} of" in panel.output.value
        panel.buttons["Prev"].click()
        assert panel.slider.value == 1  # stays in range
    finally:
        panel.close()


def test_running_the_cell_again_replaces_the_widget(trace) -> None:
    before = threading.active_count()
    first = Replayer(trace, Letters())
    second = Replayer(trace, Letters())
    assert Panel._open["replayer"] is second and first._closed
    second.close()
    assert threading.active_count() == before


def test_the_fallback_hides_only_where_the_widget_lives(trace) -> None:
    """A live page must not show everything twice, a saved one must not be empty."""
    panel = Replayer(trace, Letters())
    try:
        name = re.search(r'<div class="([\w-]+)">', panel.fallback_html()).group(1)
        assert f".{name} {{ display: none; }}" in panel.output.value
        assert "<style>" not in panel.fallback_html()
        assert "<details>" in panel.fallback_html()
    finally:
        panel.close()

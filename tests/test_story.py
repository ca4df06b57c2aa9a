"""What the first notebook shows: the acceptance table, the strip of a draft, the figures."""

import io

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from quasar_lab import NGramDrafter, SamplingConfig, UserError, generate
from quasar_lab.acceptance_table import acceptance_table
from quasar_lab.draft_strip import KINDS, draft_strip
from quasar_lab.paper_figures import paper_table, readable
from quasar_lab.plots.story import plot_steps, plot_terms, plot_token_chances

WEIGHTS = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)


class TestAcceptanceTable:
    @given(WEIGHTS, WEIGHTS)
    def test_what_is_emitted_is_what_the_target_says(self, p: list[int], q: list[int]) -> None:
        p_row, q_row = (torch.tensor(w, dtype=torch.float64) / sum(w) for w in (p, q))
        table = acceptance_table(p_row, q_row)
        assert (table["emitted"] - table["p"]).abs().max() < 1e-12
        assert table["emitted"].sum() == pytest.approx(1)

    def test_a_small_case_by_hand(self) -> None:
        table = acceptance_table(
            torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1]), "abc"
        )
        assert list(table.index) == ["a", "b", "c"]
        assert table["accept"].tolist() == pytest.approx([1, 3 / 7, 1])
        assert table["replaced"].tolist() == pytest.approx([0.3, 0, 0.1])

    def test_what_is_no_distribution_is_refused(self) -> None:
        with pytest.raises(UserError, match="q sums to 2"):
            acceptance_table(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0]))
        with pytest.raises(UserError, match="same shape"):
            acceptance_table(torch.tensor([0.5, 0.5]), torch.tensor([1.0]))
        with pytest.raises(UserError, match="p sums to nan"):
            acceptance_table(torch.tensor([float("nan"), 1.0]), torch.tensor([0.5, 0.5]))


class Letters:
    """Decodes token n to a text that HTML could mistake for markup."""

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


@pytest.fixture(scope="module")
def generation(tiny_llama):
    return generate(
        tiny_llama,
        [3, 4, 5, 3, 4, 5, 3],
        drafter=NGramDrafter(),
        max_new_tokens=30,
        eos_token_id=[],
        sampling=SamplingConfig(temperature=0.5, seed=1),
    )


class TestDraftStrip:
    def test_every_token_of_the_trace_stands_there_with_its_sign(self, generation) -> None:
        """Colour alone would leave out readers who do not see it."""
        strip = draft_strip(generation, Letters())
        for row in generation.trace.to_dataframe().itertuples():
            drafted = generation.steps[row.step].draft_tokens
            sign = KINDS[row.kind if drafted else "plain"][0]
            assert f"<sup>{sign}</sup>&lt;{row.token}&gt;</span>" in strip.markup

    def test_steps_without_a_draft_share_a_row(self, tiny_llama) -> None:
        """Fifty rows of one token each would push the drafts out of sight."""
        plain = generate(tiny_llama, [3, 4], max_new_tokens=5, eos_token_id=[])
        markup = draft_strip(plain, Letters()).markup
        assert markup.count("<tr>") == 2 and ">1 to 5<" in markup

    def test_every_drafting_step_has_its_row(self, generation) -> None:
        markup = draft_strip(generation, Letters()).markup
        for number, step in enumerate(generation.steps, start=1):
            if step.draft_tokens:
                assert f">{number}</td>" in markup

    def test_fewer_steps_say_how_many_are_left(self, generation) -> None:
        strip = draft_strip(generation, Letters(), max_steps=2)
        assert f"… and {len(generation.steps) - 2} more steps" in strip.markup

    def test_line_breaks_are_visible(self, generation) -> None:
        class Newlines:
            def decode(self, ids: list[int]) -> str:
                return "\n"

        assert "⏎" in draft_strip(generation, Newlines(), 1).markup

    def test_all_signs_differ(self) -> None:
        assert len({sign for sign, _, _ in KINDS.values()}) == len(KINDS)


def test_the_papers_gain_splits_into_its_terms() -> None:
    """A term the wrong way round would still look plausible: 1.053 times 1.030 make 1.085."""
    first = paper_table().iloc[0]
    assert first["length_term"] == pytest.approx(1.053, abs=1e-3)
    assert first["step_term"] == pytest.approx(1.030, abs=1e-3)
    assert first["gain"] == pytest.approx(1.085, abs=1e-3)
    assert first["gain"] == pytest.approx(first["length_term"] * first["step_term"])


def test_the_papers_table_for_a_page_keeps_every_setting() -> None:
    """An index label used twice would make two settings look like one."""
    table = paper_table()
    page = readable(table)
    assert page.index.is_unique and len(page) == len(table)
    assert page.loc["Qwen3-8B, T = 0", ("n-gram", "S")] == 1.18
    assert page.loc["OpenPangu-7B, GSM8K (its best)", ("Quasar", "S")] == 1.26
    assert page.loc["Qwen3-8B, T = 0", ("Quasar / n-gram", "step term")] == table["step_term"][0]


class TestFigures:
    def texts(self, figure: Figure) -> str:
        found = [text.get_text() for axes in figure.axes for text in axes.texts]
        found += [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
        found += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        figure.savefig(io.BytesIO(), format="png")
        return " ".join(found)

    def test_steps_show_each_target_and_its_floor(self) -> None:
        times = pd.DataFrame(
            {
                "target": ["full", "INT8"] * 2,
                "tokens": [1, 1, 2, 2],
                "median": [0.02, 0.01, 0.03, 0.012],
                "low": [0.02, 0.01, 0.03, 0.012],
                "high": [0.03, 0.02, 0.04, 0.02],
            }
        )
        texts = self.texts(plot_steps(times, {"full": 0.018, "INT8": 0.008}))
        assert "full, bytes / bandwidth: 18.0 ms" in texts and "INT8, measured" in texts

    def test_token_chances_survive_dollar_signs(self) -> None:
        """Matplotlib reads text between dollar signs as mathematics and stops at what it is not."""
        table = pd.DataFrame({"p": [0.5, 0.2], "q": [0.4, 0.3]}, index=["'$'", r"'\frac$_'"])
        assert "p" in self.texts(plot_token_chances(table))

    def test_terms_are_written_at_their_points(self) -> None:
        terms = pd.DataFrame(
            {"length_term": [1.1], "step_term": [1.5], "gain": [1.65]}, index=["here"]
        )
        assert {"1.10", "1.50", "1.65", "here"} <= set(self.texts(plot_terms(terms)).split())

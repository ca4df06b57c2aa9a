"""The demo's report: one HTML file with everything in it, readable without a network."""

import base64
import html
import io

from matplotlib.figure import Figure

from quasar_lab.demo_result import DemoResult
from quasar_lab.plots import plot_acceptance, plot_divergence, plot_gain, plot_speed

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto;
       padding: 0 1rem; color: #1c1c1c; background: #fff }
h1 { font-size: 1.7rem } h2 { font-size: 1.25rem; margin-top: 2.2rem }
p.verdict { font-size: 1.1rem; border-left: 4px solid #0173b2; padding: .2rem 0 .2rem 1rem }
div.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .35rem .55rem; text-align: right; border-bottom: 1px solid #ddd;
         white-space: nowrap }
th:first-child, td:first-child { text-align: left }
thead th { border-bottom: 2px solid #888 }
figure { margin: 1.5rem 0 } img { max-width: 100%; width: 50rem; height: auto }
figcaption, dd, .small { color: #555 } dt { font-weight: 600 } dd { margin: 0 0 .5rem 0 }
"""

_COLUMNS = (
    ("tokens/s", "tokens emitted per second of decoding, median over the generations"),
    ("vs plain", "tokens per second of all generations over plain decoding in full precision"),
    ("95 % interval", "of that ratio, over resamplings of the prompts"),
    ("L", "mean acceptance length: tokens emitted a verification step"),
    ("step", "r, the time of one step (drafting included) in plain full-precision steps; "
             "vs plain = L / step"),
    ("vs n-gram", "the ratio to n-gram speculation in full precision, and the two terms whose "
                  "product it is: how much longer L is, how much cheaper the step is"),
    ("top-1", "how often INT8 and full precision put the same token first, after the same text"),
    ("mean KL", "KL(full precision || INT8) of a token's distribution, in nats"),
)  # fmt: skip


def _image(figure: Figure, alt: str, caption: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140)
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(alt)}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def demo_page(result: DemoResult) -> str:
    """The whole page as text."""
    settings, machine, summary = result.settings, result.machine, result.summary
    table = result.table().reset_index().to_html(index=False, border=0)
    speeds = ", ".join(f"{row.label} {row.tokens_per_second:.0f}" for row in summary.itertuples())
    facts = "; ".join(
        f"{name.replace('_', ' ')}: {value}" for name, value in machine.items() if value is not None
    )
    explained = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in _COLUMNS
    )
    figures = [
        _image(
            plot_speed(result.rows, summary),
            f"Horizontal bars of median tokens per second: {speeds}",
            "Speed of each method. The methods took turns on every prompt, so that a machine that "
            "slows down does so for all of them.",
        ),
        _image(
            plot_gain(summary),
            "Scatter plot of acceptance length against step cost with lines of equal speedup",
            "Where a speedup comes from. To the right: more tokens a step. Down: a cheaper step. "
            "Grey lines join points of equal speedup over plain decoding.",
        ),
        _image(
            plot_acceptance(result.rows),
            "Mean acceptance length by kind of text for the speculative methods",
            "The n-gram drafter lives on repetition: the kind of text decides how much it finds.",
        ),
        _image(
            plot_divergence(result.fidelity),
            "Cumulative distribution of the KL divergence of INT8 from full precision",
            "What INT8 changes in the model's predictions. Speculation adds nothing to this: its "
            "output follows the verifier that it uses exactly.",
        ),
    ]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Quasar on {html.escape(settings.model)}</title><style>{_STYLE}</style></head><body>
<h1>Quasar on {html.escape(settings.model)}, measured here</h1>
<p class="verdict">{html.escape(result.verdict)}</p>
<div class="wide">{table}</div>
<p class="small">{len(result.rows)} generations of up to {settings.max_new_tokens} tokens,
temperature {settings.temperature:g}, drafts of up to {settings.draft.num_draft_tokens} tokens,
n-grams of {settings.draft.min_ngram} to {settings.draft.max_ngram}, engine:
{html.escape(", ".join(dict.fromkeys(result.rows["engine"])))}, in {result.seconds:.0f} s.
{html.escape(facts)}.</p>
{"".join(figures)}
<h2>How to read the table</h2><dl>{explained}</dl>
<p class="small">Method: Quasar, Huang and Wen, arXiv 2603.01399. All numbers on this page were
measured in one run on the machine above.</p>
</body></html>
"""

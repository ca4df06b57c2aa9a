"""The map of the course: what each notebook shows, how long it takes, and what it needs.

The start page, the site, the README's test and `quasar-lab doctor` read it from here.
"""

from dataclasses import dataclass

START_PAGE = "start"


@dataclass(frozen=True, slots=True)
class Lesson:
    """One notebook. minutes: to read it; better_with: what it uses where it is there."""

    stem: str
    title: str
    shows: str
    minutes: int
    memory_gigabytes: int = 3
    better_with: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        return self.stem[:2]


LESSONS = (
    Lesson(
        "00_the_memory_wall",
        "The memory wall",
        "why decoding waits for memory: the roofline, a plain step against a verify step, "
        "a calculator for other chips and models",
        25,
    ),
    Lesson(
        "01_quasar_in_one_sitting",
        "Quasar in one sitting",
        "the whole story on the real model: the memory wall, a draft judged token by token, what "
        "INT8 changes, the measured table",
        20,
    ),
    Lesson(
        "02_outliers_and_smoothing",
        "Outliers and smoothing",
        "where activation outliers sit, what SmoothQuant and m2 do about them; an outlier explorer",
        30,
    ),
    Lesson(
        "03_int8_gemm",
        "The INT8 product",
        "from sums that wrap to exact ones, the roofline of your machine, the Triton kernel and "
        "its machine code",
        30,
        better_with=("Triton", "GPU"),
    ),
    Lesson(
        "04_speculative_decoding",
        "Speculative decoding",
        "the acceptance rule by hand, proved by enumeration, replayed step by step",
        30,
    ),
    Lesson(
        "05_quasar",
        "Quasar",
        "verification by the INT8 model: four cells, two terms, a lossless mode; a what-if panel",
        35,
        memory_gigabytes=4,
    ),
    Lesson(
        "06_logit_fidelity",
        "Logit fidelity",
        "KL, TV and top-1 by token, layer group, task and temperature: unchanged relative to "
        "which model?",
        30,
        memory_gigabytes=4,
    ),
    Lesson(
        "07_pruning_vs_quantization",
        "Pruning or quantisation",
        "at equal bytes a step: what dropping layers and what rounding do to logits, acceptance "
        "and speed; a keep-ratio slider",
        30,
        memory_gigabytes=4,
    ),
    Lesson(
        "08_live_throughput",
        "Live throughput",
        "the methods race while you watch: tokens a second, acceptance, and the text side by side",
        20,
        memory_gigabytes=4,
    ),
    Lesson(
        "09_reproduce_the_paper",
        "Reproduce the paper",
        "the paper's tables on your machine, and a critical reading of both",
        35,
        memory_gigabytes=4,
        better_with=("GPU",),
    ),
    Lesson(
        "10_from_lab_to_serving",
        "From lab to serving",
        "export the INT8 model, serve it, and see when INT8 verification stops paying",
        30,
        memory_gigabytes=4,
        better_with=("GPU",),
    ),
)


def navigation(stem: str) -> str:
    """The line of links that begins and ends a notebook: its neighbours, the map, the words."""
    place = [lesson.stem for lesson in LESSONS].index(stem)
    links = [f"[Map]({START_PAGE}.ipynb)", "[Glossary](../docs/glossary.md)"]
    if place:
        before = LESSONS[place - 1]
        links.insert(0, f"[← {before.number} · {before.title}]({before.stem}.ipynb)")
    if place + 1 < len(LESSONS):
        after = LESSONS[place + 1]
        links.append(f"[{after.number} · {after.title} →]({after.stem}.ipynb)")
    return " | ".join(links)

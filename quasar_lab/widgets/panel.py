"""What all widgets share: settings on top, a visible state, a picture, one worker at most.

ipykernel calls widget callbacks on threads and does not print from them into the cell, so a widget
changes traits only (an HTML text, an image), a run is one daemon thread behind a lock, and Stop is
an event that the run looks at. Re-executing a cell closes the panel that it made before.
"""

import html
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import ipywidgets as widgets

from quasar_lab.errors import UserError

DEBOUNCE_SECONDS = 0.15


class Panel:
    """A box of controls with a state line and an output; subclasses fill `self.output`.

    key: panels with the same key replace each other, so that a re-executed cell leaves no thread,
    no callback and no picture of its former self behind.
    """

    _open: ClassVar[dict[str, "Panel"]] = {}

    def __init__(self, key: str, controls: list[widgets.Widget]) -> None:
        former = Panel._open.pop(key, None)
        if former is not None:
            former.close()
        Panel._open[key] = self
        self.key = key
        self.controls = controls
        self.state = widgets.HTML()
        self.output = widgets.HTML()
        self.box = widgets.VBox(
            [widgets.HBox(controls, layout={"flex_flow": "row wrap"}), self.state, self.output]
        )
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._busy = False  # a thread lives on for a moment after its run: it cannot tell
        self._stop = threading.Event()
        self._closed = False
        self.set_state("ready")

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.box._repr_mimebundle_(**options)

    def set_state(self, state: str, message: str = "") -> None:
        """Show a state: "ready", "running", "done", "stopped" or "error"."""
        self._shown = state
        color = {"error": "#d55e00", "running": "#0173b2"}.get(state, "#555")
        text = html.escape(f"{state}: {message}" if message else state)
        self.state.value = f'<span role="status" style="color: {color}">{text}</span>'

    def observe(self, update: Callable[[], None], *controls: widgets.Widget) -> None:
        """Call `update` once when the controls have been still for a moment."""
        for control in controls:
            control.observe(lambda _change: self._debounce(update), names="value")

    def _debounce(self, update: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(DEBOUNCE_SECONDS, self._settled, [update])
            self._timer.daemon = True
            self._timer.start()

    def _settled(self, update: Callable[[], None]) -> None:
        """The update of a control; a run that is going on keeps its own state."""
        working = self._busy
        if not working:
            self.set_state("running")
        self.refresh(update)
        if not working and self._shown == "running":
            self.set_state("done")

    def flush(self) -> None:
        """Wait until a pending update is done: without a front end nothing else would."""
        timer = self._timer
        if timer is not None:
            timer.join()

    def refresh(self, update: Callable[[], None]) -> None:
        """Run `update` and show how it went."""
        try:
            update()
        except UserError as error:
            self.set_state("error", str(error))
        except Exception as error:  # shown to the reader: a thread's traceback would be lost
            self.set_state("error", f"{type(error).__name__}: {error}")

    def start(self, run: Callable[[threading.Event], None]) -> bool:
        """Run in the background; False, and nothing happens, while a run is going on."""
        with self._lock:
            if self._closed or self._busy:
                return False
            self._busy = True
            stop = self._stop = threading.Event()
            self._worker = threading.Thread(target=self._work, args=(run, stop), daemon=True)
            self.set_state("running")
            self._worker.start()
        return True

    def _work(self, run: Callable[[threading.Event], None], stop: threading.Event) -> None:
        def body() -> None:
            try:
                run(stop)
            finally:
                self._busy = False  # before the state says so: whoever sees it may start again
            self.set_state("stopped" if stop.is_set() else "done")

        self.refresh(body)

    def stop(self) -> None:
        """Ask the run to end; it does within one step."""
        self._stop.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the run to end."""
        worker = self._worker
        if worker is not None:
            worker.join(timeout)

    def close(self) -> None:
        """Stop what runs, forget the callbacks, remove the widgets from the page."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
        self.stop()
        self.join(timeout=10)
        for widget in list(_parts(self.box)):
            widget.unobserve_all()
            widget.close()
        if Panel._open.get(self.key) is self:
            del Panel._open[self.key]


def _parts(widget: widgets.Widget) -> Iterator[widgets.Widget]:
    """A widget and all that it is made of: ipywidgets closes neither children nor their styles."""
    for child in getattr(widget, "children", ()):
        yield from _parts(child)
    for name in ("layout", "style"):
        if isinstance(part := getattr(widget, name, None), widgets.Widget):
            yield part
    yield widget

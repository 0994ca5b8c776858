"""Small charts as inline SVG text: axes, lines, bands, bars, marks. No scripts, no external resources.

The plots use it; it knows nothing of requests. Colours are CSS classes, so that a page can be light or dark.
"""

import math
from collections.abc import Sequence
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 40


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover [low, high] in about `count` steps."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, int(high / step + 1e-9) + 1)]


class Chart:
    """One chart: data coordinates in, SVG out. Marks are drawn in the order they are added."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        x_label: str,
        y_label: str,
        width: int = 560,
        height: int = 250,
        left: int = LEFT,
    ):
        self.x0, self.x1 = x[0], x[1] if x[1] > x[0] else x[0] + 1
        self.y0, self.y1 = y[0], y[1] if y[1] > y[0] else y[0] + 1
        self.width, self.height, self.left = width, height, left
        self._labels = (x_label, y_label)
        self._marks: list[str] = []

    def px(self, x: float) -> float:
        return round(self.left + (x - self.x0) / (self.x1 - self.x0) * (self.width - self.left - RIGHT), 1)

    def py(self, y: float) -> float:
        return round(self.height - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (self.height - TOP - BOTTOM), 1)

    def _points(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.px(x)},{self.py(y)}" for x, y in points)

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        self._marks.append(f'<polyline class="line {kind}" points="{self._points(points)}"/>')

    def steps(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """A staircase: each y holds until the next x."""
        stairs: list[tuple[float, float]] = []
        for x, y in points:
            if stairs:
                stairs.append((x, stairs[-1][1]))
            stairs.append((x, y))
        self.line(stairs, kind)

    def band(self, lower: Sequence[tuple[float, float]], upper: Sequence[tuple[float, float]], kind: str) -> None:
        """The area between two lines that share their x values."""
        outline = [*upper, *reversed(lower)]
        self._marks.append(f'<polygon class="band {kind}" points="{self._points(outline)}"/>')

    def bar(self, x: tuple[float, float], y: tuple[float, float], kind: str, title: str = "") -> None:
        """A filled rectangle in data coordinates; `title` shows when pointed at."""
        left, top = self.px(min(x)), self.py(max(y))
        wide, high = round(self.px(max(x)) - left, 1), round(self.py(min(y)) - top, 1)
        shape = f'<rect class="fill {kind}" x="{left}" y="{top}" width="{max(wide, 0)}" height="{max(high, 0)}">'
        self._marks.append(f"{shape}<title>{escape(title)}</title></rect>")

    def dot(self, x: float, y: float, kind: str, title: str = "", radius: float = 2.2) -> None:
        shape = f'<circle class="fill {kind}" cx="{self.px(x)}" cy="{self.py(y)}" r="{radius}">'
        self._marks.append(f"{shape}<title>{escape(title)}</title></circle>")

    def vertical(self, x: float, kind: str, label: str = "") -> None:
        at = self.px(x)
        self._marks.append(f'<line class="line {kind}" x1="{at}" x2="{at}" y1="{TOP}" y2="{self.height - BOTTOM}"/>')
        anchor, shift = ("end", -4) if at > self.width * 0.6 else ("start", 4)
        self._marks.append(self._text(at + shift, self.height - BOTTOM - 6, label, f"note {kind}-text", anchor))

    def horizontal(self, y: float, kind: str, label: str = "") -> None:
        at = self.py(y)
        self._marks.append(
            f'<line class="line {kind}" x1="{self.left}" x2="{self.width - RIGHT}" y1="{at}" y2="{at}"/>'
        )
        self._marks.append(self._text(self.width - RIGHT - 4, at + 13, label, f"note {kind}-text", "end"))

    def label(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "note") -> None:
        self._marks.append(self._text(self.px(x), self.py(y) + 4, text, kind, anchor))

    def name_row(self, y: float, text: str) -> None:
        """Text in the left margin, at data height y."""
        self._marks.append(self._text(self.left - 6, self.py(y) + 4, text, "tick", "end"))

    @staticmethod
    def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
        return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>' if text else ""

    def render(self, *, x_ticks: Sequence[float] | None = None, y_ticks: Sequence[float] | None = None) -> str:
        """The SVG element. Ticks are round numbers unless given; an empty list draws none."""
        floor, axes = self.height - BOTTOM, []
        for tick in nice_ticks(self.y0, self.y1, 4) if y_ticks is None else y_ticks:
            at = self.py(tick)
            axes.append(f'<line class="grid" x1="{self.left}" x2="{self.width - RIGHT}" y1="{at}" y2="{at}"/>')
            axes.append(self._text(self.left - 6, at + 4, f"{tick:g}", "tick", "end"))
        for tick in nice_ticks(self.x0, self.x1, 6) if x_ticks is None else x_ticks:
            at = self.px(tick)
            axes.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{floor}" y2="{floor + 4}"/>')
            axes.append(self._text(at, floor + 16, f"{tick:g}", "tick", "middle"))
        axes.append(f'<line class="axis" x1="{self.left}" x2="{self.width - RIGHT}" y1="{floor}" y2="{floor}"/>')
        middle = (self.left + self.width - RIGHT) / 2
        axes.append(self._text(middle, self.height - 6, self._labels[0], "axis-name", "middle"))
        if self._labels[1]:
            rotated = f'transform="rotate(-90 12 {floor / 2:g})"'
            name = self._text(12, floor / 2 + 8, self._labels[1], "axis-name", "middle")
            axes.append(name.replace("<text ", f"<text {rotated} ", 1))
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        return f'<svg role="img" {size}>{"".join(axes)}{"".join(self._marks)}</svg>'

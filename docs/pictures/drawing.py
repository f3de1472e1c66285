"""A drawing: boxes, arrows and words, as SVG.

Invariant: every colour has a light and a dark value, on a background that has them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

COLOURS = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#8c959f", "#6e7681"),
    "blue": ("#ddf4ff", "#12314f"),
    "green": ("#dafbe1", "#12361f"),
    "amber": ("#fff1c2", "#453209"),
    "red": ("#ffe2df", "#4f1b1b"),
    "grey": ("#eef1f4", "#21262d"),
}
"""By name: light, dark."""

SANS, MONO = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif", "ui-monospace,'DejaVu Sans Mono',monospace"


def _style() -> str:
    def rules(shade: int) -> str:
        fills = "".join(f".{name}{{fill:{values[shade]}}}" for name, values in COLOURS.items())
        ink, faint = COLOURS["ink"][shade], COLOURS["faint"][shade]
        return f"{fills}.line{{stroke:{ink}}}.thin{{stroke:{faint}}}"

    return (
        f"text{{font-family:{SANS};font-size:13px}}.mono{{font-family:{MONO};font-size:12px}}"
        f".strong{{font-weight:600}}.line,.thin{{fill:none}}.thin{{stroke-dasharray:3 4}}{rules(0)}"
        f"@media (prefers-color-scheme:dark){{{rules(1)}}}"
    )


class Drawing:
    """An SVG of *width* by *height*; *title* is what a reader who cannot see it is told."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img">\n<title>{escape(title)}</title>\n<style>{_style()}</style>\n'
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path class="ink" d="M0 0L10 5L0 10z"/></marker></defs>\n'
            f'<rect class="paper" width="{width}" height="{height}"/>\n'
        )
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A rounded box with its border."""
        at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"'
        self._parts.append(f'<rect class="{colour}" {at}/><rect class="line" {at}/>')

    def band(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A plain area."""
        self._parts.append(f'<rect class="{colour}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>')

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        """One line of text with its baseline at *y*."""
        kind = f"{'faint' if style == 'faint' else 'ink'} {style}".strip()
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def lines(self, x: float, y: float, lines: Iterable[str], style: str = "", anchor: str = "start") -> None:
        """Lines of text under each other, 17 pixels apart."""
        for number, line in enumerate(lines):
            self.text(x, y + 17 * number, line, style, anchor)

    def path(self, points: Sequence[tuple[float, float]], *, tip: bool = True, style: str = "line") -> None:
        """A line through *points*, with an arrow's tip at its end."""
        way = "L".join(f"{x:g} {y:g}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        self._parts.append(f'<path class="{style}" d="M{way}"{end}/>')

    def ribbon(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A broad line through *points*, each lower than the one before."""
        sides = [*((x - 6, y) for x, y in points), *((x + 6, y) for x, y in reversed(points))]
        way = "L".join(f"{x:g} {y:g}" for x, y in sides)
        self._parts.append(f'<path class="{colour}" d="M{way}z"/>')

    def svg(self) -> str:
        """The whole file."""
        return self._head + "\n".join(self._parts) + "\n</svg>\n"

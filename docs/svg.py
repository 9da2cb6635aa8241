"""A few shapes of SVG, for docs/figures.py: small files that follow the light or dark setting of the reader."""

from __future__ import annotations

from html import escape

STYLE = """
  .page{fill:#fff} text{font:12px system-ui,sans-serif;fill:#1f2328} .title{font-weight:600} .small{font-size:11px;fill:#57606a}
  .end{text-anchor:end} .middle{text-anchor:middle} .kept{fill:#0969da} .more{fill:#bc4c00} .pale{fill:#afb8c1} .gone{fill:#d8dee4}
  .line{fill:none;stroke-width:2} .kept.line{fill:none;stroke:#0969da} .more.line{fill:none;stroke:#bc4c00}
  .pale.line{fill:none;stroke:#6e7781;stroke-dasharray:5 4} .axis{stroke:#8c959f;fill:none} .before{fill:none;stroke:#8c959f}
  @media(prefers-color-scheme:dark){.page{fill:#0d1117} text{fill:#e6edf3} .small{fill:#9198a1} .kept{fill:#4493f8} .more{fill:#db6d28}
  .pale{fill:#656c76} .gone{fill:#30363d} .kept.line{stroke:#4493f8} .more.line{stroke:#db6d28} .pale.line{stroke:#9198a1} .axis{stroke:#656c76}
  .before{stroke:#9198a1}}
""".strip()  # noqa: E501


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """A line of text whose baseline is at y."""
    return f'<text x="{number(x)}" y="{number(y)}" class="{kind}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect {place} class="{kind}"/>'


def line(points: list[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    return f'<path d="M{" L".join(f"{number(x)} {number(y)}" for x, y in points)}" class="{kind}"/>'


def document(width: int, height: int, title: str, shapes: list[str]) -> str:
    """An SVG file. title: what screen readers say."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    return "\n".join([head, f"<style>{STYLE}</style>", box(0, 0, width, height, "page"), *shapes, "</svg>"]) + "\n"

"""The directive ``drawing``: text that draws boxes and arrows becomes an SVG that follows the theme of the page."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Final

from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from sphinxcontrib.svgbob._svgbob import to_svg

if TYPE_CHECKING:
    from sphinx.application import Sphinx

CELL: Final = (8, 16)
"""Width and height of a character in a drawing, in pixels; ``site.css`` has a font that fits."""


def draw(text: str, caption: str, prefix: str) -> str:
    """Return the drawing as an SVG element without colours.

    Args:
        text: The text, as svgbob takes it.
        caption: What it shows, for screen readers.
        prefix: Makes the ids in the element those of this drawing, because a page may have several.
    """
    svg = to_svg(text, include_styles=False)
    lines = text.splitlines()
    # svgbob does not count text in quotes that reaches beyond everything else, and so would cut it off.
    width, height = (max(map(len, lines)) + 1) * CELL[0], (len(lines) + 1) * CELL[1]
    size = f'role="img" aria-label="{caption}" width="{width}" height="{height}"'
    svg = re.sub(r'width="[\d.]+" height="[\d.]+"', size, svg, count=1)
    svg = re.sub(r'<marker id="', rf'<marker id="{prefix}-', svg)
    return re.sub(r'class="([^"]*\b(start|end)_marked_(\w+)[^"]*)"', rf'class="\1" marker-\2="url(#{prefix}-\3)"', svg)


class Drawing(SphinxDirective):
    """Draw the content with svgbob, inside the page, so that its colours are those of the theme.

    The one argument is what the drawing shows, in words: its caption, and what a screen reader says.
    """

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return a figure with the drawing and its caption."""
        self.assert_has_content()
        text = "\n".join(self.content)
        if self.env.app.builder.format != "html":
            return [nodes.literal_block(text, text)]
        caption = escape(self.arguments[0])
        svg = draw(text, caption, f"drawing-{self.env.new_serialno('drawing')}")
        # On a narrow screen the drawing scrolls, with the keyboard as well once it has the focus.
        html = f'<figure class="drawing"><div tabindex="0">{svg}</div><figcaption>{caption}</figcaption></figure>'
        return [nodes.raw("", html, format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive to Sphinx."""
    app.add_directive("drawing", Drawing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""The directive ``drawing``: text that draws boxes and arrows becomes an SVG that follows the theme of the page."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from sphinxcontrib.svgbob._svgbob import to_svg

if TYPE_CHECKING:
    from sphinx.application import Sphinx


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
        svg = to_svg(text, include_styles=False).replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1)
        html = f'<figure class="drawing"><div>{svg}</div><figcaption>{caption}</figcaption></figure>'
        return [nodes.raw("", html, format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive to Sphinx."""
    app.add_directive("drawing", Drawing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""The directives ``command-options`` and ``common-options``: commands with synopsis, options and defaults."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from argument_texts import COMMON, escaped, groups_of, help_of, signature_of, synopsis_of
from sphinx.util.docutils import SphinxDirective

from pybk.admin.cli import NOUNS, whole_parser

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx


class CommandOptions(SphinxDirective):
    """Document the commands of a noun."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a section for each command."""
        [noun] = [each for each in NOUNS if each.name == self.arguments[0]]
        parser = whole_parser().verbs[noun.name]
        lines = []
        for words, command in parser.commands(noun.name):
            text = escaped(command.description or "")
            lines += [f"## pybk {' '.join(words)}", "", f"{text[:1].upper()}{text[1:]}.", ""]
            lines += ["```text", synopsis_of(command), "```", ""]
            lines += [f"```{{program}} pybk {' '.join(words)}", "```", ""]
            for title, actions in groups_of(command):
                if title != COMMON:
                    lines += options(command, actions)
        return self.parse_text_to_nodes("\n".join(lines) + "\n", allow_section_headings=True)


class CommonOptions(SphinxDirective):
    """Document the options that all commands have."""

    def run(self) -> list[nodes.Node]:
        """Return the entries of the options."""
        command = whole_parser().verbs["ledger"].verbs["list"]
        lines = ["```{program} pybk", "```", ""]
        for title, actions in groups_of(command):
            if title == COMMON:
                lines += options(command, actions)
        return self.parse_text_to_nodes("\n".join(lines) + "\n")


def options(command: argparse.ArgumentParser, actions: list[argparse.Action]) -> list[str]:
    """Return entries in Markdown."""
    lines = []
    for action in actions:
        lines += [f"```{{option}} {signature_of(action)}", escaped(help_of(command, action)), "```", ""]
    return lines


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives to Sphinx."""
    app.add_directive("command-options", CommandOptions)
    app.add_directive("common-options", CommonOptions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

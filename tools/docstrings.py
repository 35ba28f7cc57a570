"""A Griffe extension that adapts our docstrings to its parser of Google style."""

import re

import griffe

NAMES = re.compile(r"^( +)(\w+(?:, \w+)+): ", re.MULTILINE)
SOURCE = re.compile(r"^( *)Source: (.*(?:\n +.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Keeps names that are explained together in one item, and uses headings that it knows."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            text = NAMES.sub(lambda item: f"{item[1]}{nonbreaking(item[2])}: ", obj.docstring.value)
            text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
            obj.docstring.value = SOURCE.sub(paragraph, text)


def nonbreaking(names):
    """Return the names joined by spaces at which the parser does not split them."""
    return names.replace(" ", "\N{NO-BREAK SPACE}")


def paragraph(source):
    """Return a "Source:" section as a paragraph, without indentation."""
    return f"{source[1]}**Source:** {' '.join(source[2].split())}"

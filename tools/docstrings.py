"""An extension of Griffe: our docstrings as its parser of Google's style takes them."""

import re

import griffe

NAMES = re.compile(r"^( +)(\w+(?:, \w+)+): ", re.MULTILINE)
SOURCE = re.compile(r"^( *)Source: (.*(?:\n +.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Keeps names that are explained together in one item; headings are those that it knows."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            text = NAMES.sub(lambda item: f"{item[1]}{nonbreaking(item[2])}: ", obj.docstring.value)
            text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
            obj.docstring.value = SOURCE.sub(paragraph, text)


def nonbreaking(names):
    """Return names between which the parser finds no end of the first, and no type."""
    return names.replace(" ", "\N{NO-BREAK SPACE}")


def paragraph(source):
    """Return a paragraph without a section's heading and indentation."""
    return f"{source[1]}**Source:** {' '.join(source[2].split())}"

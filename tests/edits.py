"""Edits of a method's source, to plant bugs: their places are named, and survive other wording.

An edit names the method, as Class.method, and what it changes there: a statement, by what it calls
or assigns, or an expression. Both are compared token by token, in Python and Cython alike, whatever
the line breaks. An edit whose place is gone, or no longer the only one, raises a ValueError.
"""

from __future__ import annotations

import io
import re
import textwrap
import token
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LAYOUT = token.NL, token.COMMENT, token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER
# What may stand beside an expression that is not only names, calls and items.
BOUNDARIES = {*"()[],:=", "and", "or", "not", "if", "else", "while", "return"}
JOINING = "and", "or", "not", "if", "else", "in", "is"
CONTINUED = "elif", "else", "except", "finally"


class Change(NamedTuple):
    """Lines of a source, from `first` to before `end`, and what they become."""

    first: int
    end: int
    lines: str


class Statement(NamedTuple):
    """A statement's tokens, up to its block; its depth; its lines, and where its block ends."""

    tokens: list
    depth: int
    first: int
    end: int

    def find(self, words: str) -> list[range]:
        """Return where these tokens are, as a whole expression."""
        wanted = tokens_of(words)
        here = [each.string for each in self.tokens]
        found = []
        for start in range(len(here) - len(wanted) + 1):
            before = here[start - 1] if start else "("
            after = here[start + len(wanted)] if start + len(wanted) < len(here) else ")"
            if here[start : start + len(wanted)] != wanted or before == ".":
                continue
            if not has_operator(wanted) or {before, after} <= BOUNDARIES:
                found.append(range(start, start + len(wanted)))
        return found

    def test(self) -> range | None:
        """Return where the condition of an `if` or a `while` is."""
        tests = self.tokens[0].string in ("if", "while") and self.tokens[-1].string == ":"
        return range(1, len(self.tokens) - 1) if tests else None


def tokens_of(words: str) -> list[str]:
    read = tokenize.generate_tokens(io.StringIO(words).readline)
    return [each.string for each in read if each.type not in LAYOUT]


def has_operator(words: list[str]) -> bool:
    """Return whether an operator joins these words, outside any brackets."""
    depth = 0
    for word in words:
        depth += (word in "([{") - (word in ")]}")
        if depth == 0 and (word in JOINING or not re.fullmatch(r"[\w.)\]}]+", word)):
            return True
    return False


class Method:
    """A method's statements; lines count from 0 in the whole source."""

    def __init__(self, source: str, name: str):
        self.name = name
        self.lines = source.split("\n")
        owner, method = name.split(".")
        begin = self._line(rf"(cdef )?class {owner}\b", 0, len(self.lines))
        ends = (k for k in range(begin + 1, len(self.lines)) if re.match(r"\w", self.lines[k]))
        end = next(ends, len(self.lines))
        self.start = self._line(rf"    (cdef|cpdef|def)\b[^(=]*\b{method}\(", begin, end)
        self.statements = list(self._read())

    def _line(self, pattern: str, first: int, end: int) -> int:
        found = [k for k in range(first, end) if re.match(pattern, self.lines[k])]
        if len(found) != 1:
            raise ValueError(f"the source does not have, once: {self.name}")
        return found[0]

    def _read(self) -> Iterator[Statement]:
        text = io.StringIO("\n".join(self.lines[self.start :]) + "\n")
        read, depth, tokens = [], 0, []
        for each in tokenize.generate_tokens(text.readline):
            depth += (each.type == token.INDENT) - (each.type == token.DEDENT)
            if read and depth < 2 and each.type not in LAYOUT:
                break
            if each.type == token.NEWLINE:
                read.append((tokens, depth))
                tokens = []
            elif each.type not in LAYOUT:
                tokens.append(each)
        for k, (tokens, depth) in enumerate(read[1:], 1):
            last = k
            while last + 1 < len(read) and (
                read[last + 1][1] > depth
                or (read[last + 1][1] == depth and read[last + 1][0][0].string in CONTINUED)
            ):
                last += 1
            end = read[last][0][-1].end[0]
            yield Statement(tokens, depth, self.start + tokens[0].start[0] - 1, self.start + end)

    def only(self, found: list, what: str):
        if len(found) != 1:
            raise ValueError(f"{self.name} does not have, once: {what}")
        return found[0]

    def statement(self, what: str) -> Statement:
        """Return the only statement with this expression."""
        return self.only([each for each in self.statements if each.find(what)], what)

    def replace(self, statement: Statement, where: range, new: str) -> Change:
        """Return a statement with `new` in place of some of its tokens."""
        first, last = statement.tokens[where[0]], statement.tokens[where[-1]]
        lines = self.lines[self.start + first.start[0] - 1 : self.start + last.end[0]]
        rest = lines[-1][last.end[1] :]
        lines = [
            *self.lines[statement.first : self.start + first.start[0] - 1],
            lines[0][: first.start[1]] + new + rest,
            *self.lines[self.start + last.end[0] : statement.end],
        ]
        return Change(statement.first, statement.end, textwrap.dedent("\n".join(lines)))


@dataclass(frozen=True)
class Edit:
    """An edit of a method; see the subclasses."""

    method: str

    def change(self, source: str) -> Change:
        return self.change_of(Method(source, self.method))

    def change_of(self, method: Method) -> Change:
        raise NotImplementedError

    def apply(self, source: str) -> str:
        """Return the edited source."""
        lines = source.split("\n")
        first, end, new = self.change(source)
        indent = re.match(" *", lines[first])[0]
        return "\n".join([*lines[:first], textwrap.indent(new, indent), *lines[end:]])


@dataclass(frozen=True)
class Instead(Edit):
    """Replace the statement with the expression `what`, and its block, by others."""

    what: str
    new: str

    def change_of(self, method):
        statement = method.statement(self.what)
        return Change(statement.first, statement.end, self.new)


def drop(method: str, what: str) -> Edit:
    """Drop the statement that calls or assigns `what`, or whose condition does."""
    return Instead(method, what, "pass")


@dataclass(frozen=True)
class Return(Edit):
    """Return at once."""

    value: str

    def change_of(self, method):
        first = method.statements[0]
        if len(first.tokens) == 1 and first.tokens[0].type == token.STRING:
            first = method.statements[1]
        return Change(first.first, first.first, f"return {self.value}")


@dataclass(frozen=True)
class Replace(Edit):
    """Replace the expression `old`; among others, the one in the statement with `within`."""

    old: str
    new: str
    within: str = ""

    def change_of(self, method):
        among = [method.statement(self.within)] if self.within else method.statements
        found = [(statement, where) for statement in among for where in statement.find(self.old)]
        return method.replace(*method.only(found, self.old), f"({self.new})")


@dataclass(frozen=True)
class Decide(Edit):
    """Replace the condition `test` of an `if` or a `while`."""

    test: str
    new: str

    def change_of(self, method):
        wanted = tokens_of(self.test)
        found = []
        for statement in method.statements:
            where = statement.test()
            if where and [statement.tokens[k].string for k in where] == wanted:
                found.append(statement)
        statement = method.only(found, self.test)
        return method.replace(statement, statement.test(), self.new)


@dataclass(frozen=True)
class Disregard(Edit):
    """Go on as if the call of `called`, which is a condition, had always returned True."""

    called: str

    def change_of(self, method):
        found = [
            statement
            for statement in method.statements
            if statement.test() and any(w[0] == 1 for w in statement.find(self.called))
        ]
        statement = method.only(found, self.called)
        end = statement.test()[-1]
        return method.replace(statement, range(end, end + 1), ") or True")


@dataclass(frozen=True)
class Begin(Edit):
    """Give a variable another first value."""

    variable: str
    value: str

    def change_of(self, method):
        for statement in method.statements:
            words = [each.string for each in statement.tokens]
            if words[0] == self.variable and "=" in words:
                where = range(words.index("=") + 1, len(words))
                return method.replace(statement, where, self.value)
        return method.only([], self.variable)


def choices(source: str, edits: list[Edit], chosen: str) -> str:
    """Return the source with all edits, of which the number `chosen` has one made at run time."""
    places = {}
    for number, edit in enumerate(edits):
        first, end, new = edit.change(source)
        places.setdefault((first, end), []).append((number, new))
    lines = source.split("\n")
    above = len(lines)
    for (first, end), made in sorted(places.items(), reverse=True):
        if end > above:
            raise ValueError(f"{edits[made[0][0]].method} has edits one in another")
        above = first
        choice = []
        for number, new in made:
            choice += [f"if {chosen} == {number}:", textwrap.indent(new, "    ")]
        if end > first:
            old = textwrap.dedent("\n".join(lines[first:end]))
            choice = [re.sub("^if", "elif", each) if k else each for k, each in enumerate(choice)]
            choice += ["else:", textwrap.indent(old, "    ")]
        indent = re.match(" *", lines[first])[0]
        lines[first:end] = textwrap.indent("\n".join(choice), indent).split("\n")
    return "\n".join(lines)

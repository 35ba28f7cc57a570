"""The README, the pages beside it and those of docs/: their blocks, headings and links."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BESIDE = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES = [README, *BESIDE, *sorted((ROOT / "docs").glob("*.md"))]
INLINE = r"`((?:[^`\n]|\n(?! *\n))*)`"


def name(page):
    """Return a page's name, as tests that have it as a parameter are called."""
    return page.relative_to(ROOT).as_posix()


def text():
    """Return all pages' text."""
    return "\n".join(page.read_text() for page in PAGES)


def blocks(page):
    """Return the languages and texts of a page's blocks of code."""
    found = re.findall(r"^ *```(.*)\n((?:.*\n)*?) *```$", page.read_text(), re.MULTILINE)
    assert 2 * len(found) == page.read_text().count("```"), f"{page} has a block without its end"
    return found


def command_lines(page):
    """Return the words of each command line in a page's blocks."""
    text = "".join(text for language, text in blocks(page) if language == "sh")
    lines = text.replace("\\\n", "").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def task_scripts():
    """Return the blocks that are scripts for `wagma train --script`."""
    return [text for page in PAGES for _, text in blocks(page) if "def model():" in text]


def prose(page):
    """Return a page's text without its blocks of code."""
    return re.sub(r"^ *```.*\n(?:.*\n)*? *```$", "", page.read_text(), flags=re.MULTILINE)


def inline(page):
    """Return the pieces of code in a page's text."""
    return [" ".join(code.split()) for code in re.findall(INLINE, prose(page))]


def anchors(page):
    """Return what a link may name of a page, as GitHub makes it of the headings."""
    found = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *$", prose(page), re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        again = (f"{anchor}-{number}" for number in range(1, 100))
        found.add(anchor if anchor not in found else next(a for a in again if a not in found))
    return found


def links(page):
    """Return where a page's links and images lead, but for those to other sites."""
    written = re.sub(INLINE, "", prose(page))
    found = re.findall(r"\]\(<?([^)>\s]+)", written)
    found += re.findall(r"^ *\[[^]]+\]: *<?([^>\s]+)", written, re.MULTILINE)
    found += re.findall(r"<[^>]* (?:src|href)=[\"']([^\"']+)", written)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def dead_links(page):
    """Return the links of a page to files that are not there, or that lack the heading."""
    dead = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead

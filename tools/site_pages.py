"""A MkDocs hook: adds pages from outside docs/, and adapts links of the source tree."""

import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "readme.md",
    "benchmarks/results/README.md": "results.md",
}
SOURCES = {page: source for source, page in OUTSIDE.items()}
LINK = re.compile(r"(\]\(|src=\")([^)\s\"]+)")

# In a table's code GitHub removes the backslash, and Python-Markdown keeps it.
IN_TABLE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")


def on_files(files, config):
    """Add the pages from elsewhere in the source tree."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Replace a page's links to files of the source tree by links within the site."""
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    markdown = LINK.sub(lambda link: link[1] + in_site(link[2], source), markdown)
    return IN_TABLE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)


def in_site(link, source):
    """Return the site's link for a link in a file of the source tree."""
    path, hash_, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", link):
        return link
    target = (ROOT / PurePosixPath(source).parent / path).resolve().relative_to(ROOT).as_posix()
    return OUTSIDE.get(target, target.removeprefix("docs/")) + hash_ + anchor

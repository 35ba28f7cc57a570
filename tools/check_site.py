"""Check that a built site contains everything that a browser loads to show its pages.

Usage: python tools/check_site.py DIRECTORY

Links to other hosts are allowed, since nothing is requested until they are followed.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

FOLLOWED = {"alternate", "author", "canonical", "help", "license", "next", "prev", "search"}
LOADED = {"data", "poster", "src"}
# The theme's script would fetch libraries for these elements from other hosts.
FETCHING = {"mermaid"}
IN_STYLES = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


class Page(HTMLParser):
    """Collects the files that a page loads."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.fetching, self.in_style = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = {name: value or "" for name, value in attributes}
        self.in_style = tag == "style"
        self.loads += [given[name] for name in LOADED & given.keys()]
        if tag in ("image", "use") or (tag == "link" and not FOLLOWED & {*given["rel"].split()}):
            self.loads += [given[name] for name in ("href", "xlink:href") if name in given]
        self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part]
        self.loads += loaded_by_styles(given.get("style", ""))
        self.fetching += FETCHING & {*given.get("class", "").split()}

    def handle_data(self, data):
        if self.in_style:
            self.loads += loaded_by_styles(data)

    def handle_endtag(self, tag):
        self.in_style = False


def loaded_by_styles(text):
    """Return the files that a style sheet loads."""
    return [address or imported for address, imported in IN_STYLES.findall(text)]


def problems(site):
    """Return a line for each file that the pages of a directory load and that is not in it."""
    found = []
    for path in sorted(site.rglob("*.html")) + sorted(site.rglob("*.css")):
        page = Page(path.read_text()) if path.suffix == ".html" else None
        for address in page.loads if page else loaded_by_styles(path.read_text()):
            if address.startswith(("data:", "#")):
                continue
            local = unquote(re.split("[?#]", address)[0])
            # An absolute path refers to the published site: 404.html has some.
            file = site / local[1:] if local.startswith("/") else path.parent / local
            if re.match(r"[a-z]+:|//", address) or not file.is_file():
                found.append(f"{path.relative_to(site)} loads {address}")
        found += (
            [f"{path.relative_to(site)} has a {name}" for name in page.fetching] if page else []
        )
    return found


def main():
    site = Path(sys.argv[1])
    if not (site / "index.html").is_file():
        sys.exit(f"{site} has no index.html")
    if found := problems(site):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()

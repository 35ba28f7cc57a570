"""The check of the documentation's site (`make docs`): it tells what would come from elsewhere."""

import subprocess
import sys

import pages
import pytest

LOADS = [
    '<script src="%s"></script>',
    '<link rel="stylesheet" href="%s">',
    '<link rel="preconnect" href="%s">',
    '<link rel="icon" href="%s">',
    '<img src="%s">',
    '<img srcset="%s 2x">',
    '<svg><use href="%s"/></svg>',
    '<p style="background: url(%s)">',
    "<style>@import '%s';</style>",
    "<style>a { cursor: url('%s') }</style>",
]
ELSEWHERE = ["https://a.example/x.png", "//a.example/x.png", "gone.png", "../site.png"]
HERE = ["x.png", "x.png?v=1", "/x.png", "folder/../x.png"]


def check(site):
    script = pages.ROOT / "tools" / "check_site.py"
    ended = subprocess.run(
        [sys.executable, script, site], capture_output=True, text=True, timeout=30, check=False
    )
    return ended.returncode, ended.stderr.splitlines()


@pytest.fixture
def site(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.png").touch()
    (tmp_path / "index.html").write_text('<a href="https://a.example">followed</a>')
    return tmp_path


def test_what_is_loaded_from_elsewhere_is_found(site):
    for number, form in enumerate(LOADS):
        text = "\n".join(form % address for address in ELSEWHERE)
        (site / f"{number}.html").write_text(text)
    (site / "style.css").write_text("a { src: url(https://a.example/font.woff) }")
    (site / "picture.html").write_text('<pre class="mermaid">')
    status, lines = check(site)
    found = [
        f"{number}.html loads {address}" for number in range(len(LOADS)) for address in ELSEWHERE
    ]
    found += ["picture.html has a mermaid", "style.css loads https://a.example/font.woff"]
    assert (status, sorted(lines)) == (1, sorted(found))


def test_what_is_in_the_site_is_not_found(site):
    text = "".join(form % address for form in LOADS for address in HERE)
    (site / "page.html").write_text(text + '<img src="data:image/png;base64,AA==">')
    (site / "style.css").write_text("a { src: url(x.png) } b { fill: url(#c) }")
    assert check(site) == (0, [])


def test_a_folder_without_a_site_is_told(tmp_path):
    assert check(tmp_path) == (1, [f"{tmp_path} has no index.html"])

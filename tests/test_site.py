"""What a page of the documentation would fetch from elsewhere is found."""

from __future__ import annotations

from pathlib import Path

from tests import site


def test_what_a_page_loads_from_elsewhere_is_found() -> None:
    """Scripts, pictures and style sheets of other hosts are found; links to follow and own files are not meant."""
    page = """
    <link rel="stylesheet" href="https://fonts.example/a.css"><link rel="canonical" href="https://docs.example/">
    <link rel="stylesheet" href="assets/main.css"><script src="//cdn.example/b.js"></script>
    <img src="data:image/png;base64,//8="><img src="dashboard/run.png"><a href="https://example.org">elsewhere</a>
    """
    assert site.fetched_from_elsewhere(page) == ["https://fonts.example/a.css", "//cdn.example/b.js"]


def test_a_site_without_pages_fails(tmp_path: Path) -> None:
    """An empty directory is no documentation; a page that loads something makes the check fail."""
    assert site.main(tmp_path) == 1
    (tmp_path / "index.html").write_text("<p>whole</p>")
    assert site.main(tmp_path) == 0
    (tmp_path / "more.html").write_text('<script src="https://cdn.example/x.js"></script>')
    assert site.main(tmp_path) == 1

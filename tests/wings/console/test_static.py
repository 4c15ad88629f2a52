"""Scripts, styles and what is vendored: pinned by digest, in the wheel, with their licences, and small."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import httpx

from holdfast_service.wings import console
from holdfast_service.wings.console import static
from tests.serving import Served

ROOM = Path(console.__file__).parent
LINES_MAX = 400


def test_vendored_files_are_what_was_published() -> None:
    """Each is named with its version and has the digest that was noted when it was taken from its package."""
    noted = dict(reversed(line.split()) for line in (ROOM / "static/vendor/CHECKSUMS.sha256").read_text().splitlines())
    held = {path.name: path for path in (ROOM / "static/vendor").iterdir() if path.name != "CHECKSUMS.sha256"}
    assert set(noted) == set(held)
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in held.items()} == noted
    for name in held:
        assert "LICENSE" in name or re.search(r"-\d+\.\d+\.\d+", name), name
        assert f"{name.split('-')[0]}-LICENSE.txt" in held, name


def test_every_file_is_served_or_a_licence() -> None:
    """Nothing lies about that no page uses; every name that is served is there."""
    held = {str(path.relative_to(ROOM / "static")) for path in (ROOM / "static").rglob("*") if path.is_file()}
    assert held - set(static.SERVED) == {"vendor/CHECKSUMS.sha256"} | {
        f"vendor/{name}-LICENSE.txt" for name in ("htmx", "swagger", "uPlot")
    }
    assert set(static.SERVED) <= held


def test_addresses_change_with_content(service: Served) -> None:
    """A file may be kept for good, because its address has its digest; other names are not there."""
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        for name in static.SERVED:
            got = client.get(static.address(name))
            assert got.status_code == 200
            assert "immutable" in got.headers["cache-control"]
            assert got.content == files(console).joinpath("static", *name.split("/")).read_bytes()
            assert static.address(name).endswith(hashlib.sha256(got.content).hexdigest()[:16])
        for name in ("vendor/CHECKSUMS.sha256", "../rendering.py", "%2e%2e/rendering.py", "nope.js"):
            assert client.get(f"/static/{name}").status_code == 404


def test_scripts_fetch_and_evaluate_nothing() -> None:
    """Our own scripts name no other address, evaluate no text, and put text into pages as text."""
    for path in (ROOM / "static").glob("*.js"):
        text = path.read_text()
        assert not re.search(
            r"https?:|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
        ), path
        assert len(text.splitlines()) <= LINES_MAX


def test_styles_fetch_nothing() -> None:
    """No font, image or sheet comes from elsewhere; light and dark, phones and still pictures are thought of."""
    text = "".join(path.read_text() for path in (ROOM / "static").glob("*.css"))
    assert not re.search(r"url\(|@import", text)
    for part in ("color-scheme: light dark", "max-width: 640px", "prefers-reduced-motion", ":focus-visible"):
        assert part in text


def test_templates_escape_by_default() -> None:
    """No template marks anything as safe, and none has a handler or a style of its own."""
    for path in (ROOM / "templates").glob("*.html"):
        text = path.read_text()
        assert not re.search(r"\|\s*safe|autoescape|\son\w+=|\sstyle=|<style|hx-on|javascript:", text), path
        assert len(text.splitlines()) <= LINES_MAX


def test_the_wheel_has_everything() -> None:
    """The wheel is made of the packages' directories as they are, and no pattern leaves these files out."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    built = re.findall(r"^\[tool\.hatch\.build[^\]]*\]\n((?:(?!\[).*\n)*)", text, re.M)
    assert any('"service/holdfast_service"' in section for section in built)
    assert not any(re.search(r"^(exclude|include|only-include)\b", section, re.M) for section in built)
    assert files(console).joinpath("templates", "base.html").is_file()

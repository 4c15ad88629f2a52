"""What goes wrong when daemons of several nodes are started the first time: one sentence each, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.databases import Postgres
from tests.regressions.test_many_daemons import Site, site

__all__ = ["site"]
pytestmark = pytest.mark.usefixtures("forked_programs")


def refused(root: Path, url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A daemon that is started at `url`, and does not stay."""
    command = [sys.executable, "-m", "holdfast_service", "--root", str(root), "--listen", "none", "--exit-when-idle", "1"]
    command += ["--socket", str(root.parent / "refused.sock"), "--catalog", url, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize("mistake", ["no server", "no database", "no user", "tables of others"])
def test_a_mistake_in_the_first_url_does_not_stay(site: Site, mistake: str) -> None:
    """The first daemon of a root does not start without its catalog: the root would remember one that never was."""
    there = site.url.rpartition("/")[0]
    urls = {"no server": "postgresql://postgres:secret@127.0.0.1:1/holdfast", "no database": f"{there}/none"}
    urls |= {"no user": site.url.replace("//postgres:", "//nobody:"), "tables of others": site.url}
    url = site.postgres.make("template0") if mistake == "tables of others" else urls[mistake]
    if mistake == "tables of others":
        execute(url, "CREATE TABLE runs (id int)")
    found = refused(site.root, url)
    assert found.returncode == 6, found.stderr
    assert "catalog-unavailable" in found.stderr and "--catalog" in found.stderr and "secret" not in found.stderr
    assert found.stderr.count("\n") == 2
    site.start("a").stop()  # with the right URL
    if mistake == "tables of others":
        site.postgres.drop(url)


def test_a_catalog_of_another_root_leaves_no_mark(site: Site, tmp_path: Path) -> None:
    """A root that is refused by the catalog of another one can be served with its own."""
    site.start("a").stop()
    other = tmp_path / "other"
    found = refused(other, site.url)
    assert found.returncode == 4 and "belongs to another root" in found.stderr
    assert refused(other, f"sqlite:///{tmp_path}/own.sqlite").returncode == 0


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_another_encoding_is_refused_by_name(postgres: Postgres, tmp_path: Path, encoding: str) -> None:
    """Names and messages that it cannot hold would fail much later, one by one."""
    name = f"in_{encoding.lower()}"
    postgres.execute(
        f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LOCALE_PROVIDER libc LC_COLLATE 'C' LC_CTYPE 'C'"
    )
    found = refused(tmp_path / "root", postgres.url(name))
    postgres.drop(postgres.url(name))
    assert found.returncode == 2 and encoding in found.stderr and "UTF8" in found.stderr
    assert found.stderr.count("\n") == 2, found.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://holdfast:secret@host:none/holdfast", "is not a valid catalog URL"),
        ("postgresql://holdfast:sec@ret/word@host/holdfast", "%40"),
    ],
)
def test_a_url_that_is_none_is_refused_by_name(tmp_path: Path, url: str, said: str) -> None:
    """Without a word of the password."""
    found = refused(tmp_path / "root", url)
    assert found.returncode == 2 and said in found.stderr
    assert "secret" not in found.stderr and "ret/word" not in found.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_an_address_that_is_everywhere_is_told_to_nobody(site: Site, host: str) -> None:
    """Another node would look for the bytes of this one at itself, and give every save up after a minute."""
    found = refused(site.root, site.url, "--exchange", f"{host}:0")
    told = [line for line in found.stderr.splitlines() if " INFO " not in line]
    assert found.returncode == 2 and "other nodes can reach" in found.stderr and len(told) == 2, found.stderr


def execute(url: str, statement: str) -> None:
    import psycopg

    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(statement.encode())

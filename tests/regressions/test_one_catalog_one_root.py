"""A catalog belongs to one root: another root is refused at start, by name, and neither loses anything by it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.rest import service_jobs
from holdfast_formats.errors import WrongRoot
from holdfast_formats.rest.offline import CatalogWork
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import ownership
from holdfast_service.control.control import Control
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import OwnerRow
from holdfast_service.storage import PosixStore, stored_in
from holdfast_service.storage.posix import PosixTier
from tests.control.published import a_manifest, put_checkpoint
from tests.daemons import running
from tests.databases import Postgres, database_url

pytestmark = pytest.mark.usefixtures("forked_programs")

__all__ = ["database_url"]
NOW = "2026-01-01T00:00:00.000Z"


def listed(url: str) -> list[int]:
    catalog = Catalog.open(url)
    try:
        return [made.step for made in catalog.checkpoints("run", None, 100).items]
    finally:
        catalog.close()


def started(root: Path, url: str) -> subprocess.CompletedProcess[str]:
    """A daemon that is to be refused; it ends by itself where it is not."""
    flags = ["--root", str(root), "--catalog", url, "--socket", str(root.parent / "second.sock")]
    command = [sys.executable, "-m", "holdfast_service", *flags, "--listen", "none", "--exit-when-idle", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def tool(work: str, root: Path, url: str) -> subprocess.CompletedProcess[str]:
    asked = CatalogWork(act=work, root=str(root), catalog=url).model_dump_json()
    return subprocess.run(service_jobs.command(), input=asked, capture_output=True, text=True, timeout=180)


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    url = postgres.take()
    yield url
    postgres.give_back(url)


def test_the_second_root_is_refused_and_the_first_one_keeps_all(tmp_path: Path, postgres_url: str) -> None:
    """The round that is open stays open, what is listed stays listed; the refusal names the root that has the catalog."""
    root, other = tmp_path / "root", tmp_path / "other"
    with running(root, "--catalog", postgres_url) as daemon:
        model = torch.nn.Linear(2, 2)
        with Checkpointer("run", {"model": model}, at=daemon.socket) as checkpointer:
            checkpointer.save(1, wait="durable").result()
            with closing(Catalog.open(postgres_url)) as catalog:
                catalog.rounds.open("run", 2, 1, 1, NOW)
            done = started(other, postgres_url)
            assert done.returncode == 4 and "wrong-root" in done.stderr and str(root) in done.stderr, done.stderr
            assert "catalog adopt" in done.stderr
            with closing(Catalog.open(postgres_url)) as catalog:
                assert [found.step for found in catalog.rounds.page("run", "open").items] == [2]
            assert listed(postgres_url) == [1]
            checkpointer.save(3, wait="durable").result()
    assert listed(postgres_url) == [3, 1]
    refused = tool("rebuild", other, postgres_url)
    assert refused.returncode == 4 and "wrong-root" in refused.stdout and listed(postgres_url) == [3, 1]


def test_a_catalog_that_comes_back_as_anothers_is_told_nothing(tmp_path: Path) -> None:
    """Where a daemon began while its catalog was away, whose it is is asked when it is there, before anything is told."""
    url = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    with closing(Catalog.open(url)) as catalog:
        ownership.adopt(catalog, ownership.Root("first", str(tmp_path / "first"), tmp_path / "first", "node"), NOW)
        tier = PosixTier(tmp_path / "second")
        me = ownership.Root("second", str(tmp_path / "second"), tmp_path / "second", "node")
        control = Control(stored_in(tier), catalog, claim=lambda: ownership.claim(PosixStore(tier), catalog, me, NOW))
        try:
            control.recovery.recover()
            assert control.launches.declare("mine", "launch", 1, None) == 1, "training continues without it"
            assert control.record_queue.state is not None and "belongs to another root" in control.record_queue.state
            assert catalog.known_runs() == {}
        finally:
            control.close()


def test_a_root_that_was_moved_by_copying_is_given_the_catalog_on_purpose(tmp_path: Path) -> None:
    """A copy is refused like any other root, until `holdfast catalog adopt`; then the root that had it is refused."""
    (tmp_path / "catalogs").mkdir()
    url = f"sqlite:///{tmp_path}/catalogs/catalog.sqlite"
    root, copy = tmp_path / "root", tmp_path / "copy"
    put_checkpoint(PosixTier(root), a_manifest("run", 1))
    with running(root, "--catalog", url):
        pass
    shutil.copytree(root, copy)
    assert "wrong-root" in started(copy, url).stderr
    adopted = tool("adopt", copy, url)
    assert adopted.returncode == 0 and str(root) in adopted.stdout, adopted
    with running(copy, "--catalog", url):
        pass
    assert "wrong-root" in started(root, url).stderr
    assert listed(url) == [1]


def test_a_copied_root_keeps_the_catalog_that_was_copied_with_it(tmp_path: Path) -> None:
    """The catalog in a root's own directory is its own: a copy starts, with an id of its own, and says so once."""
    root, copy = tmp_path / "root", tmp_path / "copy"
    put_checkpoint(PosixTier(root), a_manifest("run", 1))
    with running(root):
        pass
    shutil.copytree(root, copy)
    with running(copy):
        pass
    assert listed(f"sqlite:///{copy}/catalog.sqlite") == [1]
    assert "is a copy of another root" in (tmp_path / "copy.log").read_text()


class TestAnOlderCatalog:
    """One that has no owner yet goes to the root that it lists, once."""

    @pytest.fixture
    def catalog(self, database_url: str, tmp_path: Path):
        opened = Catalog.open(database_url.replace(str(tmp_path), str(tmp_path / "elsewhere")))
        yield opened
        opened.close()

    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()

    def claim(self, tmp_path: Path, catalog: Catalog, name: str) -> None:
        tier = PosixTier(tmp_path / name)
        ownership.claim(
            PosixStore(tier), catalog, ownership.Root(f"id-of-{name}", str(tmp_path / name), tmp_path / name, "node"), NOW
        )

    def test_an_empty_one_is_the_first_ones(self, tmp_path: Path, catalog: Catalog) -> None:
        self.claim(tmp_path, catalog, "one")
        self.claim(tmp_path, catalog, "one")
        with pytest.raises(WrongRoot, match="one on node"):
            self.claim(tmp_path, catalog, "two")

    def test_one_that_lists_a_roots_checkpoints_is_that_roots(self, tmp_path: Path, catalog: Catalog) -> None:
        """A copy has the same checkpoints, and is not the directory in which they were listed."""
        from holdfast_service.control.checkpoints import roots

        tier = PosixTier(tmp_path / "one")
        put_checkpoint(tier, a_manifest("run", 1))
        roots.reconcile(PosixStore(tier), catalog)
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        put_checkpoint(PosixTier(tmp_path / "three"), a_manifest("run", 1))
        for name in ("two", "three"):
            with pytest.raises(WrongRoot, match="are not in"):
                self.claim(tmp_path, catalog, name)
        self.claim(tmp_path, catalog, "one")

    def test_of_two_that_start_at_once_one_has_it(self, tmp_path: Path, catalog: Catalog) -> None:
        """Whichever is first, the other one is refused, every time."""
        for number in range(8):
            with catalog.database.write() as session:
                for row in session.query(OwnerRow):
                    session.delete(row)
            began = threading.Barrier(2)
            refused: list[str] = []

            def start(name: str, began: threading.Barrier = began, refused: list[str] = refused) -> None:
                opened = Catalog(Database.open(str(catalog.database.engine.url.render_as_string(hide_password=False))))
                try:
                    began.wait(180)
                    self.claim(tmp_path, opened, name)
                except WrongRoot:
                    refused.append(name)
                finally:
                    opened.close()

            threads = [threading.Thread(target=start, args=(f"{name}{number}",)) for name in ("a", "b")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(refused) == 1

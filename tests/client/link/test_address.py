"""Where `at` says that the daemon is: a directory, a socket or an address, and what could be two of them is refused."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.link.address import DaemonAddress, place
from holdfast_files.objects.address import BucketAddress
from holdfast_formats.errors import InvalidRequest


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a short name, for sockets, in which the process is."""
    with tempfile.TemporaryDirectory(prefix="hf-") as made:
        monkeypatch.chdir(made)
        yield Path(made)


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


@pytest.mark.parametrize("kind", [str, Path])
def test_what_stands_at_a_path_decides(here: Path, kind: type) -> None:
    """A socket is one under any name, a directory too, and so is a link to one."""
    (here / "data.sock").mkdir()
    os.symlink("daemon", here / "link")
    with listening(here / "daemon"):
        assert place(kind("daemon")) == DaemonAddress(socket=here / "daemon")
        assert place(kind("link")) == DaemonAddress(socket=here / "link")
        assert place(kind("data.sock")) == DaemonAddress(root=here / "data.sock")


@pytest.mark.parametrize("kind", [str, Path])
def test_where_nothing_stands_yet_the_name_decides(here: Path, kind: type) -> None:
    """A daemon may be started after its trainer: a socket ends in .sock, all else is to be a directory."""
    assert place(kind(f"{here}/run/holdfast.sock")) == DaemonAddress(socket=here / "run/holdfast.sock")
    assert place(kind(f"{here}/data")) == DaemonAddress(root=here / "data")
    assert place(kind("data.d")) == DaemonAddress(root=here / "data.d")
    assert place("new.sock/") == DaemonAddress(root=here / "new.sock")


@pytest.mark.parametrize(
    "url",
    ["http://localhost:8420", "https://holdfast.example", "http://[::1]:8420/", "HTTP://node-7", "https://h/behind/a/proxy"],
)
def test_an_address_has_a_scheme(url: str) -> None:
    """It is taken as it is written."""
    assert place(url) == DaemonAddress(url=url)


def test_nothing_said_is_the_users_daemon() -> None:
    """Else one of its own on ./holdfast-data, which is a directory to read with no daemon too."""
    assert place(None) == DaemonAddress(fallback=Path.cwd() / "holdfast-data")
    assert place(None).directory == Path.cwd() / "holdfast-data"
    assert (place("d").directory, place("d.sock").directory, place("http://d").directory) == (Path.cwd() / "d", None, None)


@pytest.mark.parametrize(
    "at",
    ["localhost:8420", "127.0.0.1:8420", "node-7:8420/", "[::1]:8420", "localhost", "10.0.0.7", "holdfast.example:443/x"],
)
def test_an_address_without_a_scheme_could_be_a_directory(here: Path, at: str) -> None:
    """It is neither, also where such a directory exists; the hint says what to write in front for each."""
    with pytest.raises(InvalidRequest, match="could be an address or a directory") as caught:
        place(at)
    assert '"http://"' in caught.value.hint and '"./"' in caught.value.hint
    (here / at).mkdir(parents=True)
    with pytest.raises(InvalidRequest):
        place(at)
    assert place(f"./{at}") == place(Path(at)) == DaemonAddress(root=here / at)
    assert place(f"http://{at}") == DaemonAddress(url=f"http://{at}")


@pytest.mark.parametrize(
    "at",
    [
        "ftp://node-7",
        "unix:///run/holdfast.sock",
        "unix:/run/holdfast.sock",
        "file:///data",
        "http://",
        "http://:8420",
        "http:/localhost:8420",
        "http://localhost:port",
        "http://localhost:99999",
        "http://[::1",
        " http://localhost:8420",
        "://x",
        Path("http://localhost:8420"),
    ],
)
def test_other_addresses_are_refused(at: str | Path) -> None:
    """Another scheme, no host, a port that is none, and an address that was made a path."""
    with pytest.raises(InvalidRequest, match="not the address of a daemon") as caught:
        place(at)
    assert str(at) in caught.value.detail and '"http://HOST:PORT"' in caught.value.hint


@pytest.mark.parametrize("name", ["file", "file.sock"])
def test_a_file_is_no_place(here: Path, name: str) -> None:
    """Neither by its name nor by what it is."""
    (here / name).touch()
    with pytest.raises(InvalidRequest, match=f"{name}' is neither a directory nor a socket"):
        place(name)


@pytest.mark.parametrize(
    ("at", "said"),
    [("", "is empty"), (" ", "is empty"), ("a\0b", "not a path"), (8420, "not int"), (b"/data", "not bytes")],
)
def test_what_is_no_path_is_refused(at: object, said: str) -> None:
    """By name, with the three things that can be written."""
    with pytest.raises(InvalidRequest, match=said) as caught:
        place(at)  # type: ignore[arg-type]
    assert "http://HOST:PORT" in caught.value.hint


def test_a_path_is_meant_where_it_was_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may change its directory before it saves; a home directory is that of its user."""
    (here / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(here / "home"))
    said, said_of_none, said_of_a_socket = place("data"), place(None), place("d.sock")
    monkeypatch.chdir(here / "elsewhere")
    assert said.root == here / "data"
    assert said_of_none.directory == here / "holdfast-data"
    assert said_of_a_socket.socket == here / "d.sock"
    assert place("~/data").root == here / "home" / "data"


def test_a_slash_at_the_end_means_a_directory(here: Path) -> None:
    """So a socket that is there is refused at once, and not at the first save."""
    with listening(here / "daemon"), pytest.raises(InvalidRequest, match="is a socket, not a directory"):
        place("daemon/")


@pytest.mark.parametrize("at", ["data", "d.sock", None])
def test_nothing_is_relative_to_a_directory_that_is_gone(
    here: Path, monkeypatch: pytest.MonkeyPatch, at: str | None
) -> None:
    """The hint says what helps; an absolute path does."""
    gone = here / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InvalidRequest, match="relative to the current directory, which was removed"):
        place(at)
    assert place(here / "data").root == here / "data"


@pytest.mark.parametrize(
    "at", [" data", "data ", "~nobody-of-this-name/data", "file/data", "nothing", "nothing/below", "x" * 300]
)
def test_what_can_be_no_directory_is_refused_at_once(here: Path, at: str) -> None:
    """Blanks around it, nobody's home, a file above, a link to nothing, a name too long: not only at the first save."""
    (here / "file").touch()
    os.symlink("gone", here / "nothing")
    with pytest.raises(InvalidRequest) as refused:
        place(at)
    assert "at=" in refused.value.detail and refused.value.hint


@pytest.mark.parametrize(
    "within", ["run", "run/checkpoints", "run/checkpoints/step-00000005", "run/checkpoints/step-00000005/new"]
)
def test_a_checkpoint_is_no_root(here: Path, within: str) -> None:
    """Nor is a run, nor a link into one: what was written there made the checkpoint one that nothing could remove."""
    (here / "run/checkpoints/step-00000005").mkdir(parents=True)
    (here / "run/checkpoints/step-00000005/COMMIT").touch()
    (here / "run/checkpoints/step-00000005/manifest.json").touch()
    (here / ".holdfast.root").touch()
    (here / "elsewhere").symlink_to(here / within)
    for at in (within, here / "elsewhere" if (here / within).exists() else within):
        with pytest.raises(InvalidRequest, match=r"cannot be a root: .* is (a checkpoint|the directory of a run)"):
            place(at)
    assert place(".").root == here
    assert place("other").root == here / "other"


@pytest.mark.parametrize("url", ["http://h:1/?a=b", "http://h:1/#x", "http://user:word@h:1"])
def test_an_address_says_no_more_than_where(url: str) -> None:
    """A query or a password in it would be dropped, or sent to nobody who asks for it."""
    with pytest.raises(InvalidRequest, match="not the address of a daemon"):
        place(url)


def test_a_bucket_has_a_directory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what its daemon keeps; another one for each address."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    one, other = place("s3://bucket/data"), place("s3://bucket/more")
    assert one.bucket == BucketAddress("bucket", "data") and one.readable is not None
    assert one.readable.label == "s3://bucket/data"
    assert one.root is not None and one.root.parent == tmp_path / "holdfast" and one.root != other.root
    assert one == place("s3://bucket/data/")


@pytest.mark.parametrize("at", ["s3:/bucket/data", "S3://bucket", "gs://bucket/data", "s3://user:secret@bucket/data"])
def test_addresses_of_no_bucket_are_refused(at: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        place(at)
    assert "secret" not in str(caught.value) and "s3://" in caught.value.hint

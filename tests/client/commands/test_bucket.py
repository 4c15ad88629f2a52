"""Commands on a bucket: the page's own lines, and what is said of a bucket that cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import holdfast
from holdfast_formats import naming
from tests import snippets
from tests.checkpoints import build
from tests.client import llama
from tests.kit.bucket_roots import upload
from tests.kit.commands import call
from tests.kit.objects import BucketServer, TestBucket

RUN = "llama3-8b"
PLACE = "s3://models/team/checkpoints"
PAGE = Path(__file__).parents[3] / "docs" / "restoring.md"
SECRET = "hunter2+hunter2/hunter2"

pytestmark = pytest.mark.usefixtures("no_service")


@pytest.fixture
def s3(moto_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TestBucket:
    """An empty bucket that commands find, from an empty directory."""
    _reach(moto_bucket.server, monkeypatch)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return moto_bucket


@pytest.fixture
def place(s3: TestBucket, tmp_path: Path) -> str:
    """A root in the bucket, with a small Llama."""
    held = {"model": llama.arrays(), "extra": {}}
    build(tmp_path / "root" / naming.checkpoint_path(RUN, 500), held, run=RUN, step=500, config=llama.CONFIG_BYTES)
    return upload(tmp_path / "root", s3, "team/checkpoints")


def _reach(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def test_the_lines_of_the_page(place: str) -> None:
    """Each of them does what it says, and the download is a checkpoint."""
    (snippet,) = (one for one in snippets.snippets(PAGE) if PLACE in one.text)
    for words in filter(None, snippets.commands(snippet.text.replace(PLACE, place))):
        assert words[0] == "holdfast"
        result = call(*words[1:])
        assert result.exit_code == 0, result.output
    local = llama.cut(llama.arrays(), 2, 1)
    found = load_file("rank-1.safetensors")
    assert set(found) == set(local) and all(np.array_equal(found[name], local[name]) for name in local if "layers" in name)
    assert call("verify", "./llama3-8b").exit_code == 0


def test_a_program(place: str) -> None:
    """Both ways to name a checkpoint in Python."""
    name = "model.embed_tokens.weight"
    for opened in (holdfast.open(f"{place}/{RUN}@latest"), holdfast.open(f"{RUN}@500", root=place)):
        with opened as checkpoint:
            assert np.array_equal(checkpoint.read(name), llama.arrays()[name])


def test_what_a_bucket_cannot_do(place: str) -> None:
    """Each is refused by name, and none of it is asked of another service."""
    refused = {
        ("convert", f"{place}/{RUN}", "dest", "--as", "hf"): "only checkpoints of Holdfast are converted",
        ("convert", f"{place}/{RUN}@500", "dest", "--as", "hf", "--dry-run"): "without a dry run",
        ("show", f"{place}/{RUN}@latest-healthy"): "known only to a running service",
        ("show", f"{place}/{RUN}@500", "--root", "."): "cannot be combined",
        ("show", f"{place}/{RUN}"): "does not name a checkpoint",
        ("pin", f"{place}/{RUN}@500"): "this needs a service",
        ("ls", "--tag", "x", "--root", place): "cannot be listed by tag",
    }
    for command, why in refused.items():
        result = call(*command)
        assert result.exit_code == 2 and why in " ".join(result.output.replace("│", " ").split()), result.output
    assert not Path("dest").exists()


def test_an_export_for_another_program(place: str, s3: TestBucket) -> None:
    """It is made out of the bucket, in which nothing changes; also while a daemon has its lease. What is damaged or missing
    leaves nothing.
    """
    s3.put(f"team/checkpoints/{naming.OWNER}", b"of another daemon")
    before = s3.sizes()
    done = call("export", f"{place}/{RUN}@latest", "hf", "--as", "hf", "--dtype", "fp32")
    assert done.exit_code == 0 and "as hf" in done.output, done.output
    found = load_file(next(Path("hf").glob("*.safetensors")))
    held = llama.arrays()
    assert set(found) == set(held) and all(np.array_equal(found[name], held[name]) for name in held)
    assert s3.sizes() == before
    assert call("export", f"{place}/{RUN}@501", "none", "--as", "hf").exit_code == 3
    key = next(key for key in before if key.endswith(".safetensors"))
    s3.put(key, bytes(before[key]))
    damaged = call("export", f"{place}/{RUN}@500", "damaged", "--as", "hf")
    assert damaged.exit_code == 5, damaged.output
    assert [path.name for path in Path().iterdir()] == ["hf"]


def test_what_is_no_root(s3: TestBucket) -> None:
    """A bucket that is not there, an empty place, and one with other objects are told apart."""
    s3.put("photos/1.jpg", b"x")
    said = {
        "s3://no-such-bucket-here/x": "there is no bucket no-such-bucket-here",
        f"{s3.url}/empty": "is empty: there is no .holdfast.root",
        s3.url: "is not the root of a Holdfast daemon: it has photos/",
    }
    for place, why in said.items():
        for command in (("ls",), ("show", "run@latest"), ("verify", "run@5")):
            result = call(*command, "--root", place)
            assert result.exit_code == 6 and why in result.stderr and "hint: " in result.stderr, result.output


@pytest.mark.parametrize(
    "address",
    [f"s3://key:{SECRET}@bucket/prefix", f"s3://key:{SECRET}@bucket", f"S3://{SECRET}@bucket/x", f"s3://key:{SECRET}"],
)
def test_a_password_is_not_repeated(s3: TestBucket, address: str) -> None:
    """Neither as a root, nor before a checkpoint's name, nor in a program."""
    for command in (("ls", "--root", address), ("show", f"{address}/run@5"), ("verify", f"{address}@5")):
        result = call(*command)
        assert result.exit_code != 0 and SECRET[:7] not in result.output, result.output
    for where in (address, f"{address}/run@5"):
        with pytest.raises(holdfast.CheckpointError) as caught:
            holdfast.open(where)
        assert SECRET[:7] not in str(caught.value)


@pytest.mark.parametrize("address", ["s3:/bucket/x", "s3://", "S3://bucket", "s3://bucket/a//b", "gs://bucket/x", "s3://a"])
def test_what_is_no_address(s3: TestBucket, address: str) -> None:
    """The form to write is said, and no directory of that name is made or read."""
    result = call("ls", "--root", address)
    assert result.exit_code == 2 and "s3://" in result.output, result.output
    with pytest.raises(holdfast.CheckpointError):
        holdfast.open("run@5", root=address)
    assert not list(Path().iterdir())


def test_without_keys(s3: TestBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables to set are named."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    result = call("ls", "--root", s3.url)
    assert result.exit_code == 6 and "AWS_ACCESS_KEY_ID" in result.stderr, result.output


def test_a_wrong_secret(seaweedfs_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named by its variable, and never shown."""
    _reach(seaweedfs_bucket.server, monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    result = call("ls", "--root", seaweedfs_bucket.url)
    assert result.exit_code == 6 and "AWS_SECRET_ACCESS_KEY" in result.stderr and SECRET not in result.output

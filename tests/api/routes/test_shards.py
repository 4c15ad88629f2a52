"""Shards over HTTP: any rank of any layout as a safetensors file, byte for byte, and the plan to read it from storage."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.checkpoint import Checkpoint
from holdfast.export import shard_file as shard_files
from holdfast.read.sources import DirectorySource
from holdfast_formats import dtypes, naming, programs
from holdfast_formats.digest import digest
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.layout import language as layouts
from holdfast_formats.layout.parts import LocalTensor, Part
from holdfast_formats.layout.rank_tensors import of_manifest
from holdfast_formats.programs.remade import remade_holdings
from holdfast_formats.region import Box
from holdfast_service.api.content import shard_plans, shard_streams
from tests.api.shard_roots import PLAIN, Root, path_of, save
from tests.checkpoints import Built, build
from tests.layouts import models, oracle
from tests.layouts.matrix import LAYOUTS, MODELS
from tests.local_tensors import fill
from tests.serving import Served, served


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """Checkpoints of three architectures, which tests only read; runs are named as the models."""
    path = tmp_path_factory.mktemp("root")
    return Root(path, {name: save(path, model) for name, model in MODELS.items()})


@pytest.fixture(scope="module")
def service(root: Root) -> Iterator[Served]:
    with served(root.path) as running:
        yield running


@pytest.fixture(scope="module")
def http(service: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, trust_env=False, headers=PLAIN) as client:
        yield client


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows so small that every shard has many, and most of them cut tensors."""
    monkeypatch.setattr(shard_streams, "WINDOW_BYTES", 1024)


def expected(built: Built, text: str, rank: int, group: str = "model") -> dict[str, NDArray[Any]]:
    """The shard, out of the whole tensors in memory and what the layout says of them."""
    config = json.loads((built.path / shard_plans.CONFIG).read_bytes())
    held = of_manifest(built.manifest, group, layouts.parse(text), config).of(rank)
    return {local.name: fill(local, built.arrays[group]).astype(dtypes.to_numpy(local.dtype)) for local in held.tensors}


def assert_equal(data: bytes, wanted: dict[str, NDArray[Any]]) -> None:
    read = safetensors.numpy.load(data)
    assert {name: (array.shape, array.tobytes()) for name, array in read.items()} == {
        name: (array.shape, array.tobytes()) for name, array in wanted.items()
    }


@pytest.mark.parametrize(("run", "named"), [(run, named) for run, layouts in LAYOUTS.items() for named in layouts])
def test_every_rank_of_every_layout_gets_its_shard(root: Root, http: httpx.Client, run: str, named: str) -> None:
    """All named layouts, their ranks and two groups: a file of exact length, with what the oracle says of the rank."""
    world, whole = LAYOUTS[run][named], root.made[run].arrays
    for rank in range(world.ranks):
        for group in ("model", "master"):
            got = http.get(path_of(run), params={"layout": world.text, "rank": rank, "group": group})
            assert got.status_code == 200, got.text
            assert got.headers["content-length"] == str(len(got.content))
            arrays = {name: np.asarray(whole[group][name]) for name in sorted(whole[group], key=natural_key)}
            held = oracle.held(world, MODELS[run], arrays, rank, group)
            read = safetensors.numpy.load(got.content)
            assert {name for name in read if read[name].size} == {name for name in held if held[name].size}
            for name, array in read.items():
                assert not array.size or np.array_equal(array, held[name]), f"rank {rank}, {group}: {name}"


def test_a_column_and_a_row_shard_are_the_slices_one_expects(root: Root, http: httpx.Client) -> None:
    """Rank 1 of tp=2 has the second half of q_proj's rows, and of o_proj's columns; the file says whose it is."""
    data = http.get(path_of("llama"), params={"layout": "tp=2", "rank": 1}).content
    read, whole = safetensors.numpy.load(data), root.made["llama"].arrays["model"]
    block = "model.layers.1.self_attn"
    assert np.array_equal(read[f"{block}.q_proj.weight"], whole[f"{block}.q_proj.weight"][8:])
    assert np.array_equal(read[f"{block}.o_proj.weight"], whole[f"{block}.o_proj.weight"][:, 8:])
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {
        "format": "pt",
        "run": "llama",
        "step": "5",
        "layout": "tp=2",
        "rank": "1",
        "group": "model",
    }


def test_no_layout_is_the_whole_group(root: Root, http: httpx.Client) -> None:
    """Without a layout the answer is the whole model as one file."""
    assert_equal(http.get(path_of("llama")).content, dict(root.made["llama"].arrays["model"]))


def test_validators(http: httpx.Client) -> None:
    """One ETag for all spellings of a layout, another for any other shard; GET and HEAD agree, and 304 saves the bytes."""
    url = path_of("llama")
    asked = {"layout": "tp=2,pp=2", "rank": 1}
    first = http.get(url, params=asked)
    etag = first.headers["etag"]
    assert etag.startswith('"') and first.headers["vary"] == "Accept, Accept-Encoding, Authorization, Cookie"
    spelled = http.get(path_of("llama", "latest"), params={"layout": '{"pp": 2, "tp": 2}', "rank": "1"})
    assert (spelled.headers["etag"], spelled.content) == (etag, first.content)
    others = [{**asked, "rank": 2}, {**asked, "group": "master"}, {"layout": "tp=2", "rank": 1}, {**asked, "layout": "tp=4"}]
    assert len({etag, *(http.head(url, params=other).headers["etag"] for other in others)}) == 5
    head = http.head(url, params=asked)
    assert (head.status_code, head.content) == (200, b"")
    assert {name: head.headers[name] for name in ("etag", "vary", "accept-ranges")} == {
        name: first.headers[name] for name in ("etag", "vary", "accept-ranges")
    }
    assert head.headers["content-length"] == first.headers["content-length"]
    for verb in ("GET", "HEAD"):
        got = http.request(verb, url, params=asked, headers={"If-None-Match": f'"x", {etag}'})
        assert (got.status_code, got.content, got.headers["etag"]) == (304, b"", etag)
    assert http.get(path_of("moe"), params=asked).headers["etag"] != etag


def test_the_validator_does_not_outlive_the_process(root: Root, http: httpx.Client) -> None:
    """Another service over the same root gives the same validator and the same bytes."""
    asked = {"layout": "tp=2", "rank": 0}
    first = http.get(path_of("llama"), params=asked)
    with served(root.path) as other:
        again = httpx.get(f"{other.url}{path_of('llama')}", params=asked, headers=PLAIN, trust_env=False)
    assert (again.headers["etag"], again.content) == (first.headers["etag"], first.content)


def test_ranges(http: httpx.Client) -> None:
    """Any single range is the slice of the whole answer, also across header, tensors and windows."""
    url, asked = path_of("llama"), {"layout": "tp=2,vocab=32", "rank": 1}
    whole = http.get(url, params=asked)
    data, etag = whole.content, whole.headers["etag"]
    rng = random.Random(7)
    cuts = [sorted((rng.randrange(len(data)), rng.randrange(len(data)))) for _ in range(30)]
    for low, high in [[0, 0], [4095, 4096], [8191, 8192], [8192, 8192], [len(data) - 1, len(data) - 1], *cuts]:
        got = http.get(url, params=asked, headers={"Range": f"bytes={low}-{high}"})
        assert (got.status_code, got.content) == (206, data[low : high + 1])
        assert got.headers["content-range"] == f"bytes {low}-{high}/{len(data)}"
    outside = http.get(url, params=asked, headers={"Range": f"bytes={len(data)}-"})
    assert (outside.status_code, outside.headers["content-range"]) == (416, f"bytes */{len(data)}")
    assert outside.json()["code"] == "invalid-request"
    same = http.get(url, params=asked, headers={"Range": "bytes=5-9", "If-Range": etag})
    assert (same.status_code, same.content) == (206, data[5:10])
    changed = http.get(url, params=asked, headers={"Range": "bytes=5-9", "If-Range": '"other"'})
    assert (changed.status_code, changed.content) == (200, data)


def test_compression(http: httpx.Client) -> None:
    """zstd where it is preferred: streamed, no length and no range, a validator of its own, the same bytes inside."""
    url, asked = path_of("llama"), {"layout": "tp=2", "rank": 0}
    whole = http.get(url, params=asked)
    with http.stream("GET", url, params=asked, headers={"Accept-Encoding": "zstd"}) as packed:
        raw = b"".join(packed.iter_raw())
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == (
        "zstd",
        "Accept, Accept-Encoding, Authorization, Cookie",
    )
    assert not {"content-length", "accept-ranges"} & set(packed.headers)
    assert packed.headers["etag"] not in (whole.headers["etag"], None)
    assert zstandard.ZstdDecompressor().decompressobj().decompress(raw) == whole.content
    known = {"Accept-Encoding": "zstd", "If-None-Match": packed.headers["etag"]}
    assert http.get(url, params=asked, headers=known).status_code == 304
    head = http.head(url, params=asked, headers={"Accept-Encoding": "zstd"})
    assert head.headers["etag"] == packed.headers["etag"] and "content-length" not in head.headers
    part = http.get(url, params=asked, headers={"Accept-Encoding": "zstd", "Range": "bytes=0-9"})
    assert (part.status_code, part.content) == (206, whole.content[:10])


@pytest.mark.parametrize("layout", ["tp=2,sharding=2:stage3:flat-param", "tp=2,vocab=32,qkv=groups"])
def test_the_plan_is_enough_to_read_the_shard_from_storage(root: Root, http: httpx.Client, layout: str) -> None:
    """Whoever reads what the plan's pages say, checks it and places the parts has the shard; the sums are right."""
    built, asked = root.made["llama"], {"layout": layout, "rank": 1}
    made: dict[str, NDArray[Any]] = {}
    read = 0
    page: dict[str, Any] = {"next": None}
    while page["next"] is not None or not made:
        cursor = {} if page["next"] is None else {"cursor": page["next"]}
        got = http.get(path_of("llama"), params={**asked, "limit": 7, **cursor}, headers={"Accept": "application/json"})
        page = got.raise_for_status().json()
        assert len(page["items"]) <= 7
        octets = {name: read_stored(built, page["reads"], name, stored) for name, stored in page["sources"].items()}
        read += sum(one["stop"] - one["start"] for one in page["reads"])
        for item in page["items"]:
            pieces = [
                Part(p["tensor"], Box(tuple(p["offset"]), tuple(p["shape"])), p["start"], tuple(p["strides"]))
                for p in item["parts"]
            ]
            local = LocalTensor(item["name"], item["dtype"], tuple(item["shape"]), tuple(pieces))
            assert local.padding == item["padding"]
            made[local.name] = fill(local, octets)
    wanted = expected(built, layout, 1)
    assert {name: array.tobytes() for name, array in made.items()} == {n: array.tobytes() for n, array in wanted.items()}
    assert page["tensors"] == len(made)
    data = http.get(path_of("llama"), params=asked)
    assert (page["bytes"], page["etag"]) == (len(data.content), data.headers["etag"])
    assert page["needed"] <= page["read"] <= read
    assert page["ratio"] == pytest.approx(page["read"] / page["needed"], abs=1e-3)


def read_stored(built: Built, reads: list[dict[str, Any]], name: str, stored: dict[str, Any]) -> NDArray[Any]:
    """A stored tensor as far as the reads bring it, every extent checked; the rest is garbage."""
    dtype = dtypes.to_numpy(stored["dtype"])
    octets = np.full(int(np.prod(stored["shape"])) * dtype.itemsize, 0xEE, np.uint8)
    for read in reads:
        data = (built.path / read["file"]).read_bytes()[read["start"] : read["stop"]]
        for extent in read["extents"]:
            at = extent["start"] - read["start"]
            piece = data[at : at + extent["length"]]
            assert digest(piece) == extent["digest"]
            if extent["tensor"] == name:
                first = extent["start"] - stored["start"]
                octets[first : first + extent["length"]] = np.frombuffer(piece, np.uint8)
    return octets.view(dtype).reshape(stored["shape"])


def test_the_plan_as_a_resource(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is asked for by Accept, has a validator of its own, and its pages end early where extents are many."""
    url, asked = path_of("llama"), {"layout": "tp=2", "rank": 0}
    plan = http.get(url, params=asked, headers={"Accept": "application/json"})
    assert plan.headers["content-type"] == "application/json"
    etag = plan.headers["etag"]
    known = {"Accept": "application/json", "If-None-Match": etag}
    assert etag != plan.json()["etag"]
    assert http.get(url, params=asked, headers=known).status_code == 304
    assert http.head(url, params=asked, headers={"Accept": "application/json"}).headers["etag"] == etag
    for accept in (
        "*/*",
        "text/html, */*;q=0.8",
        "application/json;q=0.5, application/octet-stream",
        "application/json;q=0",
    ):
        assert http.head(url, params=asked, headers={"Accept": accept}).headers["etag"] == plan.json()["etag"]
    monkeypatch.setattr(shard_plans, "EXTENTS_MAX", 3)
    page = http.get(url, params=asked, headers={"Accept": "application/json"}).json()
    assert len(page["items"]) == 1 and page["next"] is not None
    wrong = http.get(url, params={**asked, "cursor": "???"}, headers={"Accept": "application/json"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid-request")


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        ({"layout": "tp=3"}, 422, "state-mismatch"),
        ({"layout": "tp=banana"}, 400, "invalid-request"),
        ({"layout": "sideways=2"}, 400, "invalid-request"),
        ({"layout": "tp=2", "rank": 2}, 400, "invalid-request"),
        ({"layout": "tp=2", "rank": -1}, 400, "invalid-request"),
        ({"layout": "tp=2", "rank": "x"}, 400, "invalid-request"),
        ({"layout": "rules=nothing-like-it"}, 400, "invalid-request"),
        ({"layout": "x" * 9000}, 400, "invalid-request"),
        ({"group": "nope"}, 404, "no-such-resource"),
    ],
)
def test_what_is_wrong_is_said(http: httpx.Client, asked: dict[str, Any], status: int, code: str) -> None:
    """Layouts that do not parse or do not fit, ranks outside the world and unknown groups are problems with a hint."""
    got = http.get(path_of("llama"), params=asked)
    assert (got.status_code, got.json()["code"]) == (status, code)
    assert got.headers["content-type"] == "application/problem+json"
    assert http.head(path_of("llama"), params=asked).status_code == status


AXES = st.sampled_from([*layouts.KEYS, "TP", "", "é"])
VALUES = st.one_of(
    st.integers(-2, 9).map(str),
    st.sampled_from(["stage3", "2:stage3:dim0", "4:stage3:flat", "3:stage3:whole", "2:1/3", "split", "groups", "tp-dp-pp"]),
    st.text(max_size=6),
)
MEANT = st.sampled_from([world.text for world in LAYOUTS["moe"].values()])
LAYOUT_TEXTS = st.one_of(
    MEANT,
    st.tuples(MEANT, AXES, VALUES).map(lambda parts: f"{parts[0]},{parts[1]}={parts[2]}"),
    st.text(max_size=30),
    st.lists(st.tuples(AXES, VALUES), max_size=4).map(lambda pairs: ",".join(f"{k}={v}" for k, v in pairs)),
    st.dictionaries(AXES, st.one_of(VALUES, st.integers(), st.none()), max_size=3).map(json.dumps),
)
RANGES = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 30_000), st.integers(0, 30_000)).map(lambda span: f"bytes={span[0]}-{span[1]}"),
    st.from_regex(r"\A(bytes|items)? ?=?[0-9-]{0,25}(, ?[0-9]*-[0-9]*)?\Z"),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=LAYOUT_TEXTS, rank=st.one_of(st.integers(-1, 9), st.text(max_size=3)), asked=RANGES)
def test_nothing_that_is_asked_is_a_defect_or_a_wrong_byte(
    root: Root, http: httpx.Client, layout: str, rank: int | str, asked: str | None
) -> None:
    """Whatever layout, rank and range are: a 4xx problem, or exactly the bytes of the shard."""
    asked = asked and asked.strip()
    headers = {} if asked is None else {"Range": asked}
    got = http.get(path_of("moe"), params={"layout": layout, "rank": rank}, headers=headers)
    if got.status_code >= 400:
        assert got.status_code in (400, 416, 422), got.text
        assert got.json()["code"] in ("invalid-request", "state-mismatch")
        return
    whole = got.content
    if got.status_code == 206:
        whole = http.get(path_of("moe"), params={"layout": layout, "rank": rank}).content
        low, high = (int(end) for end in got.headers["content-range"].split()[1].split("/")[0].split("-"))
        assert got.content == whole[low : high + 1]
    assert_equal(whole, expected(root.made["moe"], layout, int(rank)))
    assert len(got.content) == int(got.headers["content-length"])


@pytest.mark.parametrize("config", [b"[1]", b"{", b"{" * 100_000, b'{"model_type": 5}', b'{"hidden_size": "many"}'])
def test_configs_that_say_nothing(tmp_path: Path, config: bytes) -> None:
    """A config.json is a file that anybody may have written: what cannot be meant is a problem, never a defect."""
    build(tmp_path / naming.checkpoint_path("odd", 5), {"model": models.llama().arrays()}, run="odd", config=config)
    with served(tmp_path) as running:
        got = httpx.get(f"{running.url}{path_of('odd')}", params={"layout": "tp=2"}, headers=PLAIN, trust_env=False)
    assert got.status_code in (200, 400, 422), got.text


def test_planned_shards_are_kept_within_bounds(service: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shards are asked for, few stay planned, and what was forgotten is planned again, the same."""
    monkeypatch.setattr(shard_plans, "PARTS_MAX", 100)
    first = http.head(path_of("moe"), params={"layout": "dp=9"}).headers["etag"]
    for rank in range(1, 9):
        http.head(path_of("moe"), params={"layout": "dp=9", "rank": rank})
    kept = service.app.state.planned._shards
    assert len(kept) == 1
    assert http.head(path_of("moe"), params={"layout": "dp=9"}).headers["etag"] == first


@pytest.mark.parametrize("program", ["hf-megatron", "hf-paddle", "hf-titan-legacy", "hf-megatron-stacked"])
def test_a_shard_through_a_program(root: Root, http: httpx.Client, program: str) -> None:
    """What a program makes, whole and in ranges that cut turned tensors; the plan, the ETag and the metadata say so."""
    built = root.made["llama"]
    config = json.loads((built.path / shard_plans.CONFIG).read_bytes())
    layout = "tp=2,sharding=2:stage1:flat"
    for group in ("model", "master"):
        wanted = {"layout": layout, "rank": "3", "group": group, "program": program}
        holdings = remade_holdings(built.manifest, group, layouts.parse(layout), config, None, programs.load(program))
        held = holdings.of(3)
        answer = http.get(path_of("llama"), params=wanted)
        assert answer.status_code == 200, answer.text
        assert_equal(answer.content, {local.name: fill(local, built.arrays[group]) for local in held.tensors})
        assert b'"program":"%s"' % program.encode() in answer.content[:4096]
        for start in range(0, len(answer.content), 3001):
            cut = http.get(path_of("llama"), params=wanted, headers={"Range": f"bytes={start}-{start + 1700}"})
            assert cut.content == answer.content[start : start + 1701]
        plain = http.head(path_of("llama"), params={key: value for key, value in wanted.items() if key != "program"})
        again = http.head(path_of("llama"), params=wanted)
        assert again.headers["ETag"] == answer.headers["ETag"] != plain.headers["ETag"]
        plan = http.get(path_of("llama"), params=wanted, headers={"Accept": "application/json"}).json()
        assert (plan["program"], plan["tensors"]) == (program, len(held.tensors))
        assert {name for item in plan["items"] for name in (part["tensor"] for part in item["parts"])} == set(
            plan["sources"]
        )


def test_what_the_client_writes_through_a_program_is_the_same_file(root: Root, http: httpx.Client, tmp_path: Path) -> None:
    built, out = root.made["llama"], tmp_path / "one.safetensors"
    with Checkpoint(DirectorySource(built.path)) as checkpoint:
        layout = layouts.parse("tp=2")
        tensors = checkpoint.held(layout, 1, program="hf-paddle").tensors
        written = shard_files.of(checkpoint.manifest, layout, 1, "model", tensors, "hf-paddle")
        shard_files.write(checkpoint.reader, "model", written, out)
    answer = http.get(path_of("llama"), params={"layout": "tp=2", "rank": "1", "program": "hf-paddle"})
    assert answer.content == out.read_bytes()


@pytest.mark.parametrize(
    ("program", "status", "told"),
    [
        ("hf", 400, "there is no program 'hf'"),
        ("../hf-paddle", 400, "there is no program"),
        ("hf-paddle-qwen-moe", 422, "program 'hf-paddle-qwen-moe'"),
        ("x" * 65, 400, "program"),
    ],
)
def test_a_program_that_does_not_fit(http: httpx.Client, program: str, status: int, told: str) -> None:
    answer = http.get(path_of("llama"), params={"program": program})
    assert answer.status_code == status and told in answer.text

"""`GET /v1/runs/{run}/compare`: two checkpoints by digests, and exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CorruptExtent, LimitExceeded, NoSuchCheckpoint, NoSuchResource
from holdfast_formats.rest.measurements import TensorHistogram
from holdfast_service.api.routes import comparisons
from tests.checkpoints import Arrays, build, flip, varied_arrays
from tests.kit.commands import call
from tests.serving import served


def changed() -> Arrays:
    """The usual tensors, one of them doubled and one of them gone."""
    arrays: dict[str, dict[str, Any]] = {group: dict(held) for group, held in varied_arrays().items()}
    arrays["model"]["layers.0.q.weight"] = arrays["model"]["layers.0.q.weight"] * np.float32(2)
    del arrays["optim"]["mask"]
    return arrays


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    build(tmp_path / naming.checkpoint_path("tiny", 5), step=5)
    build(tmp_path / naming.checkpoint_path("tiny", 10), changed(), step=10)
    with served(tmp_path) as running, Api(running.url) as api:
        yield api


def test_digests_say_what_is_equal(api: Api) -> None:
    """Every tensor once, in pages, and nothing is said of distances that nobody computed."""
    found = {(one.group, one.name): one for one in api.compare("tiny", 5, 10, limit=2)}
    assert len(found) == 8
    assert found["optim", "mask"].state == "missing-in-b"
    assert (found["model", "layers.0.q.weight"].state, found["model", "layers.0.q.weight"].change) == ("changed", None)
    assert {one.state for key, one in found.items() if key[1] not in ("mask", "layers.0.q.weight")} == {"equal"}
    assert [one.name for one in api.compare("tiny", 5, "latest", state="changed")] == ["layers.0.q.weight"]
    assert [one.name for one in api.compare("tiny", 5, 10, q="exp_avg")] == ["layers.0.q.weight/exp_avg"]


def test_exact_distances_come_from_the_bytes(api: Api) -> None:
    """A doubled tensor is as far away as it is long."""
    (one,) = api.compare("tiny", 5, 10, group="model", state="changed", exact=True)
    norm = float(np.linalg.norm(varied_arrays()["model"]["layers.0.q.weight"].astype(np.float64)))
    assert (one.norm_a, one.change, one.relative) == (pytest.approx(norm), pytest.approx(norm), pytest.approx(1.0))
    assert one.norm_b == pytest.approx(2 * norm)


def test_damage_is_named_and_limits_hold(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compared that is not proven; a page that would read too much is refused with its size."""
    monkeypatch.setattr(comparisons, "EXACT_BYTES_MAX", 100)
    with pytest.raises(LimitExceeded) as refused:
        list(api.compare("tiny", 5, 10, exact=True))
    assert refused.value.members["bytes"] == 2 * 24 * 40 * 4
    monkeypatch.undo()
    with pytest.raises(NoSuchCheckpoint):
        list(api.compare("tiny", 5, 7))
    file = next(f for f in api.tensors("tiny", 10) if f.name == "layers.0.q.weight")
    flip(tmp_path / naming.checkpoint_path("tiny", 10) / file.file, file.start + 77)
    with pytest.raises(CorruptExtent, match=r"layers\.0\.q\.weight"):
        list(api.compare("tiny", 5, 10, exact=True))


def test_histograms_of_values_and_of_changes(api: Api) -> None:
    """Every element counts once; a doubled tensor changed by itself; what cannot be counted is refused with the reason."""
    name, before = "layers.0.q.weight", varied_arrays()["model"]["layers.0.q.weight"].astype(np.float64)
    path = "/v1/runs/tiny/checkpoints/10/histogram"

    def ask(**wanted: Any) -> TensorHistogram:
        asked = {"group": "model", "name": name, **wanted}
        return api.parsed(api.request("GET", path, params=asked).content, TensorHistogram)

    values, change = ask(), ask(minus="5")
    assert (values.minimum, values.maximum) == (2 * before.min(), 2 * before.max())
    assert (change.minimum, change.maximum) == (before.min(), before.max())
    assert sum(values.counts) == sum(change.counts) == values.elements == before.size
    with pytest.raises(NoSuchResource, match="has no tensor"):
        ask(name="nope")
    with pytest.raises(NoSuchResource, match="tiny@10 has no tensor 'mask'"):
        ask(group="optim", name="mask", minus="5")
    result = call("stats", "tiny@10", "--histogram", name, "--minus", 5, "--url", api.url)
    assert result.exit_code == 0 and f"{before.size} values, 0 not finite" in result.stdout and "█" in result.stdout
    shown = call("stats", "tiny@10", "--histogram", name, "--url", api.url, "--json").stdout
    assert TensorHistogram.model_validate_json(shown) == values
    assert call("stats", "tiny@10", "--minus", 5, "--url", api.url).exit_code != 0


def test_a_histogram_that_would_read_too_much_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its size: both passes over both tensors."""
    monkeypatch.setattr(comparisons, "EXACT_BYTES_MAX", 100)
    asked = {"group": "model", "name": "layers.0.q.weight", "minus": "5"}
    with pytest.raises(LimitExceeded) as refused:
        api.request("GET", "/v1/runs/tiny/checkpoints/10/histogram", params=asked)
    assert refused.value.members["bytes"] == 2 * 2 * 24 * 40 * 4

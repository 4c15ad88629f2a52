"""The layout language: text, JSON and objects that say one layout, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout.language import (
    FORMS,
    KEYS,
    METHODS,
    STAGES,
    TEXT_BYTES_MAX,
    Forms,
    Layout,
    Sharding,
    parse,
    text,
)
from holdfast_formats.layout.mesh import AXES, ORDER, STAGES_MAX, WORLD_MAX, Mesh

EXAMPLES = [
    "",
    "tp=4,pp=2,ep=2,sharding=8:stage1",
    "pp=4:8/8/8/6",
    "pp=2:8/0/8/6,vpp=2",
    "tp=8,etp=1,ep=8,cp=2,dp=2,order=tp-cp-ep-dp-pp",
    "tp=2,pp=2,dp=2,order=tp-pp-dp",
    "sharding=8:stage1:flat:align=128:bucket=40000000",
    "sharding=8:stage2:flat:align=64:pad=128",
    "sharding=8:stage1:whole:sort=none",
    "sharding=8:stage3",
    "sharding=8:stage3:flat-param:align=4",
    "sharding=8:stage0",
    "sharding=1:stage1",
    "tp=2,vocab=128,qkv=groups,gate_up=ranks,experts=stacked,rules=llama",
]
SIZE = st.sampled_from([1, 2, 4])


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A text that is mostly a layout: parts of the language in any order."""
    parts = {axis: str(draw(SIZE)) for axis in draw(st.lists(st.sampled_from(["tp", "cp", "ep", "etp", "dp", "vpp"])))}
    if draw(st.booleans()):
        layers = draw(st.lists(st.integers(0, 9), min_size=2, max_size=2))
        parts["pp"] = draw(st.sampled_from(["2", "4", f"2:{layers[0]}/{layers[1]}"]))
    if draw(st.booleans()):
        method = draw(st.sampled_from(sorted(METHODS)))
        values = {"sort": "none", "align": "64", "pad": "128", "bucket": "4000"}
        options = [f"{name}={values[name]}" for name in draw(st.lists(st.sampled_from(["", *METHODS[method]]))) if name]
        words = draw(
            st.sampled_from([[], [draw(st.sampled_from(STAGES))], [draw(st.sampled_from(STAGES[1:])), method, *options]])
        )
        parts["sharding"] = ":".join([str(draw(SIZE)), *words])
    if draw(st.booleans()):
        parts["order"] = "-".join(draw(st.permutations(ORDER)))
    for kind in FORMS:
        if draw(st.booleans()):
            parts[kind] = draw(st.sampled_from(FORMS[kind]))
    parts |= draw(st.sampled_from([{}, {"vocab": "64"}, {"rules": "mine"}, {"rules": "auto"}]))
    return ",".join(f"{key}={parts[key]}" for key in draw(st.permutations(sorted(parts))))


def as_object(layout: Layout) -> dict[str, Any]:
    """The layout as an object: the text's keys, with numbers, and with objects where there are parts."""
    said: dict[str, Any] = dict(part.split("=", 1) for part in filter(None, text(layout).split(",")))
    mesh, sharding = layout.mesh, layout.sharding
    said |= {axis: getattr(mesh, axis) for axis in AXES if axis in said}
    said |= {"pp": {"size": mesh.pp, "layers": list(layout.split)}} if layout.split else {}
    if "sharding" in said:
        options = {name: getattr(sharding, name) for name in METHODS.get(sharding.method, ())}
        method = {"method": sharding.method} if sharding.method else {}
        said["sharding"] = {"size": mesh.sharding, "stage": sharding.stage, **method, **options}
    return said | ({"vocab": layout.vocabulary} if layout.vocabulary else {})


def refused(source: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(source)
    return caught.value


@pytest.mark.parametrize("source", EXAMPLES)
def test_a_layouts_own_text_says_it(source: str) -> None:
    """Text, object and JSON text of a layout lead back to it."""
    layout = parse(source)
    assert parse(text(layout)) == layout
    assert parse(as_object(layout)) == layout
    assert parse(json.dumps(as_object(layout), indent=1)) == layout


@given(texts())
def test_every_layout_has_one_text(source: str) -> None:
    """However it was written: the parts in another order, and as JSON of the text's own words."""
    try:
        layout = parse(source)
    except InvalidRequest:
        assume(False)
        raise
    canonical = text(layout)
    assert parse(canonical) == parse(as_object(layout)) == layout
    assert text(parse(canonical)) == canonical
    parts = source.split(",") if source else []
    assert text(parse(" , ".join(reversed(parts)))) == canonical
    assert text(parse(json.dumps(dict(part.split("=", 1) for part in parts)))) == canonical


def test_usual_things_are_left_out_of_the_text() -> None:
    """Axes of one rank, etp that is tp, the usual order and methods say nothing, wherever they stand."""
    assert text(parse("rules=auto,pp=02,tp=4,etp=4,dp=1,order=tp-cp-ep-dp-pp")) == "tp=4,pp=2"
    assert text(parse("sharding=8")) == text(parse("sharding=8:whole:stage1:sort=size")) == "sharding=8:stage1"
    assert text(parse("sharding=8:stage3:dim0")) == "sharding=8:stage3"
    assert text(parse("sharding=4:stage2:align=1:flat:bucket=0:pad=0")) == "sharding=4:stage2:flat"
    assert text(parse("tp=2,dp=2,order=cp-dp-tp-pp")) == "tp=2,dp=2,order=dp-tp"


def test_the_empty_layout_is_one_rank() -> None:
    """It holds everything, as it is stored."""
    for source in ("", "  ", "{}", {}, "tp=1", "sharding=1"):
        assert parse(source) == Layout()
    assert Layout().mesh.world == 1
    assert (Layout().stage, Layout().method, Layout().form("qkv")) == (0, "", "")


def test_the_parts_of_a_layout() -> None:
    """Every part stands where code looks for it."""
    layout = parse(
        "tp=2,pp=2:3/1,sharding=4:stage1:flat:align=8:pad=2:bucket=99,vocab=64,qkv=heads,experts=stacked,rules=gpt-2"
    )
    assert layout.mesh == Mesh(tp=2, etp=2, pp=2, sharding=4)
    assert layout.sharding == Sharding(1, "flat", align=8, pad=2, bucket=99)
    assert (layout.split, layout.vocabulary, layout.rules) == ((3, 1), 64, "gpt-2")
    assert layout.forms == Forms("heads", "", "stacked")
    assert (layout.stage, layout.method, layout.form("experts")) == (1, "flat", "stacked")


def test_objects_may_be_nested() -> None:
    """Objects for the parts that have parts, lists for orders and layers, the text's words anywhere."""
    nested = {
        "tp": "2",
        "dp": {"size": 2},
        "pp": {"size": 2, "layers": [3, "1"]},
        "order": ["tp", "pp", "dp"],
        "sharding": {"size": 2, "stage": 1, "method": "flat", "align": 8},
    }
    wanted = parse("tp=2,dp=2,pp=2:3/1,order=tp-pp-dp,sharding=2:stage1:flat:align=8")
    assert parse(nested) == parse(json.dumps(nested)) == wanted
    assert parse({"sharding": {"stage": "stage3"}}) == parse("sharding=1:stage3")


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        ("tq=4", "unknown part of a layout: 'tq'", "did you mean tp? there is tp, cp"),
        ("TP=4", "unknown part of a layout: 'TP'", "did you mean tp? there is tp"),
        ("tp=4,tp=4", "has tp twice: '4' and '4'", ""),
        ("tp", "'tp' in the layout is not key=value", ""),
        ("tp=2,", "'' in the layout is not key=value", ""),
        ("tp=0", f"tp='0' must be a whole number from 1 to {WORLD_MAX}", ""),
        ("tp=-2", "tp='-2' must be a whole number", ""),
        ("tp=٢", "must be a whole number", ""),
        ("tp=" + "9" * 3000, "must be a whole number", ""),
        (f"tp={WORLD_MAX},dp=2", "ranks are too many", "at most"),
        ("order=tp-xy", "no axis 'xy'", "tp, cp, ep"),
        ("pp=4:8/8", "pp=4:'8/8' lists 2 stages, but there are 4", "4·1 virtual stages"),
        ("pp=2:8/8,vpp=2", "2 stages, but there are 4", "2·2 virtual stages"),
        ("pp=2:", "pp's layers=''", ""),
        ("pp=2:8/-8", "pp's layers='-8'", ""),
        ("sharding=8:stage4", "unknown way to shard: 'stage4'", "did you mean stage"),
        ("sharding=8:stage1:flt", "unknown way to shard: 'flt'", "did you mean flat"),
        ("sharding=8:stage1:stage2", "more than one stage", ""),
        ("sharding=8:flat:whole", "more than one method", ""),
        ("sharding=8:stage0:flat", "sharding=8 has no method flat at stage 0", "name a stage"),
        ("sharding=8:stage0:align=2", "unknown option of stage0: 'align'", "there is none"),
        ("sharding=8:stage1:whole:align=2", "unknown option of whole: 'align'", "there is sort"),
        ("sharding=8:stage1:flat:align=0", "align='0'", ""),
        ("sharding=8:stage1:flat:align=2:align=2", "has 'align' twice", ""),
        ("sharding=8:stage1:sort=name", "unknown value of sort: 'name'", "there is size, none"),
        ("qkv=head", "unknown value of qkv: 'head'", "did you mean heads"),
        ("vocab=0", "vocab='0'", ""),
        ("rules=../x", "rules='../x' is not a table's name", ""),
        ('{"tp": 2, "tp": 2}', "names a key twice", ""),
        ('{"tp": ', "JSON cannot be read", ""),
        ("{" * TEXT_BYTES_MAX, "JSON cannot be read", ""),
        ('{"pp":' * 600, "JSON cannot be read", ""),
        ('{"tp": true}', "tp: expected a number or a word, not 'True'", ""),
        ('{"tp": 2.0}', "tp: expected a number or a word, not '2.0'", ""),
        ('{"tp": NaN}', "tp: expected a number or a word, not 'nan'", ""),
        ('{"tp": [2]}', "tp: expected a number or a word, not a list", ""),
        ('{"tp": {"sise": 2}}', "unknown option of tp: 'sise'", "did you mean size"),
        ('{"pp": {"size": 2, "layers": 8}}', "layers must be a list", ""),
        ('{"pp": {"size": 2, "layer": [8]}}', "unknown option of pp: 'layer'", "did you mean layers"),
        ({"order": ["tp"] * 10**6}, "names an axis twice", ""),
        ({"pp": {"size": 2, "layers": [1] * (STAGES_MAX + 1)}}, "layers must be a list of at most", ""),
        ({"tp": 10**5000}, "tp: expected a number or a word, not a int", ""),
        ({"tp": "9" * 10**6}, "tp: expected a number or a word", ""),
        ({2: 2}, "keys are words, not a int", ""),
        ({str(n): 1 for n in range(100)}, "at most 64 keys", ""),
        ([("tp", 2)], "a layout is text or an object", ""),
        ("x" * (TEXT_BYTES_MAX + 1), "too long", "at most 4096 bytes"),
        ("ä" * (TEXT_BYTES_MAX // 2 + 1), "too long", ""),
        ({"pp": {"size": 2000, "layers": [100] * 2000}}, "a layout whose text has 8007 characters is too long", ""),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "object",
)
def test_what_is_no_layout_is_refused(source: Any, message: str, hint: str) -> None:
    """By the part that is wrong, with what there is instead, and in few words however large the part."""
    error = refused(source)
    assert message in error.detail
    assert hint in error.hint
    assert len(str(error)) < 400


@given(
    st.one_of(st.text(max_size=80), st.lists(st.sampled_from([*KEYS, *METHODS, *STAGES, *'=:,-/{}[]"129 '])).map("".join))
)
@example("\ud800")
@example("{" + '"pp":{' * 500)
def test_any_text_is_a_layout_or_is_refused(source: str) -> None:
    """Nothing but `InvalidRequest` comes out of text, and what is taken has a text of its own."""
    try:
        layout = parse(source)
    except InvalidRequest:
        return
    assert parse(text(layout)) == layout


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=8)
        | st.sampled_from([1, 2, "2", "stage1"]),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, "size", "layers", "stage"]), inner)
        ),
        max_leaves=8,
    )
)
def test_any_json_is_a_layout_or_is_refused(source: Any) -> None:
    """The same for objects and for JSON text."""
    for form in (source, json.dumps(source)):
        try:
            layout = parse(form)
        except InvalidRequest:
            continue
        assert parse(text(layout)) == layout


def test_layers_that_do_not_divide_go_to_the_first_stages() -> None:
    """The first virtual stages have one more, and the layout says so."""
    layout = parse("pp=4")
    stages = [layout.virtual_stage(layer, 10)[0] for layer in range(10)]
    assert stages == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert layout.notes(10) == ("10 layers over 4 stages: the first 2 have 3, the others 2",)
    assert layout.notes(12) == parse("pp=4:4/3/2/1").notes(10) == ()
    assert [layout.virtual_stage(layer, 2)[0] for layer in range(2)] == [0, 1]


def test_virtual_stages_are_interleaved_as_megatrons() -> None:
    """Megatron-core's example: 16 layers, pp=4, vpp=2; GPU 0 has layers 1, 2, 9 and 10."""
    layout = parse("pp=4,vpp=2")
    held: dict[tuple[int, int], list[int]] = {}
    for layer in range(16):
        held.setdefault(layout.virtual_stage(layer, 16), []).append(layer + 1)
    assert held[0, 0] + held[0, 1] == [1, 2, 9, 10]
    assert held[3, 0] + held[3, 1] == [7, 8, 15, 16]


def test_explicit_layers_are_taken_in_the_order_of_virtual_stages() -> None:
    """One number a virtual stage, none for a stage without layers; another number of layers is refused by both numbers."""
    layout = parse("pp=2:1/0/2/3,vpp=2")
    assert [layout.virtual_stage(layer, 6) for layer in range(6)] == [(0, 0), (0, 1), (0, 1), (1, 1), (1, 1), (1, 1)]
    with pytest.raises(StateMismatch, match="the split 1/0/2/3 covers 6 layers, but the model has 8"):
        layout.virtual_stage(0, 8)


@pytest.mark.parametrize("source", ["pp=2", "pp=2:4/2", "pp=2:4/2/0/0,vpp=2", ""])
def test_layers_behind_the_last_belong_to_the_last_stage(source: str) -> None:
    """A multi-token-prediction module is numbered on, and lies in the last virtual stage."""
    layout = parse(source)
    assert layout.virtual_stage(6, 6) == layout.virtual_stage(9, 6) == (layout.mesh.pp - 1, layout.mesh.vpp - 1)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 40))
def test_every_layer_has_a_stage_and_loads_differ_by_one(pp: int, vpp: int, layers: int) -> None:
    """An even split is in order, and no virtual stage has two layers more than another."""
    layout = parse({"pp": pp, "vpp": vpp if pp > 1 else 1})
    places = [layout.virtual_stage(layer, layers) for layer in range(layers)]
    virtual = [chunk * pp + stage for stage, chunk in places]
    assert virtual == sorted(virtual)
    loads = [virtual.count(v) for v in range(pp * layout.mesh.vpp)]
    assert max(loads) - min(loads) <= 1


def test_a_mapping_with_unbounded_options_is_refused_at_the_first() -> None:
    """An object inside an object is looked at key by key, and no further than to the first that is unknown."""
    error = refused({"sharding": {f"option{n}": n for n in range(10**5)}})
    assert error.detail == "unknown option of sharding: 'option0'"

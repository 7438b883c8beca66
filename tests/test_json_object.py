"""Reading and splicing a JSON object in its raw bytes."""

import contextlib
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.apis import json_object
from extproc.apis.json_object import JsonObject
from extproc.errors import GatewayError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
spaces = st.text(alphabet=" \t\r\n", max_size=3)


@st.composite
def documents(draw):
    """An object as raw text with its members as (key, raw key, raw value), whitespace and escapes of all kinds."""
    members = []
    for key, value in draw(st.dictionaries(st.text(), values, max_size=6)).items():
        ascii_only = draw(st.booleans())
        members.append((key, json.dumps(key, ensure_ascii=ascii_only), json.dumps(value, ensure_ascii=ascii_only)))
    gaps = [draw(spaces) for _ in range(4)]
    text = (gaps[1] + "," + gaps[2]).join(f"{k}{gaps[3]}:{gaps[0]}{v}" for _, k, v in members)
    return draw(spaces) + "{" + draw(spaces) + text + draw(spaces) + "}" + draw(spaces), members


def encodable(text):
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None


edits = st.dictionaries(st.sampled_from(["a", "stream", "ü", "x y"]), st.sampled_from([b"1", b'"v"', b"[]"]))


@given(documents(), edits)
def test_an_edit_yields_the_original_plus_the_fields(document, put):
    text, members = document
    raw = encodable(text)
    if raw is None or "\\ud" in text.lower():
        return
    edited = JsonObject(raw).edited(put)
    assert json.loads(edited) == json.loads(raw) | {key: json.loads(value) for key, value in put.items()}
    position = 0
    for key, raw_key, raw_value in members:  # every other member's bytes are there, in order
        expected = put[key] if key in put else raw_value.encode()
        for piece in (raw_key.encode(), expected):
            position = edited.index(piece, position) + len(piece)


@given(documents(), st.data())
def test_dropped_members_are_gone_and_the_rest_is_untouched(document, data):
    text, members = document
    raw = encodable(text)
    if raw is None or "\\ud" in text.lower():
        return
    drop = data.draw(st.sets(st.sampled_from([key for key, _, _ in members]))) if members else set()
    edited = JsonObject(raw).edited({}, drop, b'"room":1')
    expected = {key: value for key, value in json.loads(raw).items() if key not in drop}
    assert json.loads(edited) == expected | {"room": 1}


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "\\u0061"]), values.map(json.dumps)), max_size=6), spaces)
def test_duplicates_are_found_whatever_the_values_look_like(members, space):
    text = "{" + ",".join(f'{space}"{key}":{value}{space}' for key, value in members) + "}"
    if "\\ud" in text.lower():
        return
    keys = [json.loads(f'"{key}"') for key, _ in members]
    assert JsonObject(text.encode()).duplicated() == {key for key in keys if keys.count(key) > 1}


def test_a_duplicate_cannot_hide_behind_text_that_looks_like_members():
    """Stepping by the lengths of the values that count comes out even here: strings hold members where steps land."""
    body = JsonObject((Path(__file__).parent / "data/hidden_duplicate.json").read_bytes())
    assert body.duplicated() == {"kv_transfer_params"}
    assert "kv_transfer_params" not in json.loads(body.edited({}, {"kv_transfer_params"}))


LONG = b'"long":"%b"' % (b"x" * 40_000)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["a", "b", "c", "\\u0061", '\\":1,'],
            ),
            values.map(json.dumps),
        ),
        min_size=1,
        max_size=8,
    ),
    spaces,
    st.sampled_from([{}, {"a": b"7"}, {"a": b"[]", "new": b"8"}]),
    st.sets(st.sampled_from(["b", "c", '":1,', "other"])),
    st.booleans(),
)
def test_an_edit_of_duplicates_leaves_what_it_does_not_name(members, space, put, drop, long):
    texts = [f'{space}"{key}"{space}:{space}{value}{space}' for key, value in members]
    raw = encodable("{" + ",".join(texts) + "}")
    if raw is None or b"\\ud" in raw.lower():
        return
    if long:
        raw = raw[:-1] + b"," + LONG + b"}"
    before = json.loads(raw, object_pairs_hook=list)
    edited = JsonObject(raw).edited(put, drop, b'"room":1')
    named = {key: json.loads(value) for key, value in put.items()}
    expected = [(key, named.get(key, value)) for key, value in before if key not in drop]
    fresh = [(key, value) for key, value in named.items() if key not in dict(before)]
    assert json.loads(edited, object_pairs_hook=list) == [*expected, *fresh, ("room", 1)]


def test_members_are_looked_for_once_however_often_a_body_with_duplicates_is_edited(monkeypatch):
    looked = Mock(side_effect=json_object.spans_of)
    monkeypatch.setattr(json_object, "spans_of", looked)
    body = JsonObject(b'{"a":1,"b":[],"a":2}')
    assert body.duplicated() == {"a"}
    for number in range(9):
        assert json.loads(body.edited({"b": b"%d" % number}, {"a"})) == {"b": number}
    assert looked.call_count == 2  # of those with different keys, then of all


def test_untouched_values_keep_their_exact_bytes():
    raw = b'{"big":123456789012345678901234567890,"f":1.10,"esc":"\\u00e9\\/","dup":1,"dup":2}'
    assert JsonObject(raw).edited({"new": b"true"}) == raw[:-1] + b',"new":true}'


def test_a_replaced_member_keeps_its_place():
    raw = b'{ "a": 1 , "stream" : true , "b": [{"stream": true}] }'
    assert JsonObject(raw).edited({"stream": b"false"}) == b'{"a": 1 , "stream" : false,"b": [{"stream": true}]}'


def test_an_edit_reaches_every_occurrence_of_a_duplicated_key():
    assert json.loads(JsonObject(b'{"a":[1,{"a":"}"}],"b":2,"a":3}').edited({}, {"a"})) == {"b": 2}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"  ",
        b"null",
        b"[1]",
        b'"text"',
        b"{",
        b'{"a":}',
        b'{"a":1,}',
        b'{"a":1}x',
        b'{"a":NaN}',
        b'{"a":01}',
        b'{"a":"\n"}',
        b'{"a":"\xff"}',
        b'{"a":"\\x"}',
        b"\xef\xbb\xbf{}",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_not_a_json_object_is_refused(raw):
    with pytest.raises(GatewayError) as refused:
        JsonObject(raw)
    assert refused.value.fault.code == "invalid_json"


def alike(count):
    return b",".join([b'"":0'] * count)


def distinct(count):
    return b",".join(b'"k%d":0' % i for i in range(count))


@pytest.mark.parametrize("before", [b"", LONG + b","], ids=["short", "long"])
@pytest.mark.parametrize("members", [alike, distinct])
def test_members_are_limited_as_they_stand(members, before):
    room = 1000 - bool(before)
    assert len(json.loads(JsonObject(b"{" + before + members(room) + b"}").edited({"new": b"1"}))) > 1
    with pytest.raises(GatewayError, match="more than 1000 members") as refused:
        JsonObject(b"{" + before + members(room + 1) + b"}")
    assert refused.value.fault.code == "invalid_json"


@pytest.mark.parametrize("members", [alike, distinct])
def test_what_follows_too_many_members_of_a_long_body_is_not_even_read(members):
    with pytest.raises(GatewayError, match="more than 1000 members"):
        JsonObject(b"{" + members(1001) + b",never read" + b" " * 40_000)


@pytest.mark.parametrize("item", [b'"a"', b"[1, 2]", b"7", b'"%b"' % (b"a" * 99)])
@pytest.mark.parametrize("space", [b"", b" "])
def test_a_list_is_taken_apart_up_to_its_limit(item, space):
    most = [item] * 1024
    assert JsonObject(b'{"p":[%b]}' % (space + b"," + space).join(most)).items_of("p") == most
    assert JsonObject(b'{"p":[ ]}').items_of("p") == []
    with pytest.raises(GatewayError, match="`p` must not hold more than 1024") as refused:
        JsonObject(b'{"p":[%b]}' % (space + b"," + space).join([*most, item])).items_of("p")
    assert (refused.value.fault.code, refused.value.param) == ("invalid_type", "p")


def test_an_object_inside_is_limited_as_its_holder_is():
    body = JsonObject(b'{"few":{"a":1},"many":{' + alike(1001) + b'},"list":[]}')
    few = body.object_of("few")
    assert few is not None
    assert few.get("a") == 1
    assert body.object_of("list") is body.object_of("absent") is None
    with pytest.raises(GatewayError, match="more than 1000 members"):
        body.object_of("many")


def test_a_number_that_only_looks_right_is_refused_when_it_is_read():
    body = JsonObject(b'{"n":1e999}')
    with pytest.raises(GatewayError) as refused:
        body.get("n")
    assert refused.value.fault.code == "invalid_json"


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(GatewayError, match="JSON syntax error"):
        JsonObject(b'{"model":"\\udc00"}').get("model")


@given(st.binary(max_size=60))
def test_garbage_is_refused_and_never_crashes(raw):
    with contextlib.suppress(GatewayError):
        JsonObject(raw).duplicated()

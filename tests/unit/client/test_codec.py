"""The container: round trips, agreement with the safetensors library, and every way to be wrong, by name."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_engine_client.codec import CodecError, TensorView, decode, encode

ITEM_SIZES = {"F16": 2, "BF16": 2, "F32": 4, "I32": 4}
ROWS = np.arange(12, dtype=np.float16).reshape(3, 4)
IDS = np.array([5, 6, 7], dtype=np.int32)


def build(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **extra: object) -> dict[str, Any]:
    return {"__metadata__": {"message": "{}"}, "x": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}}


@st.composite
def tensors(draw: st.DrawFn) -> TensorView:
    dtype = draw(st.sampled_from(sorted(ITEM_SIZES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = ITEM_SIZES[dtype] * int(np.prod(shape))
    return TensorView(dtype, shape, memoryview(draw(st.binary(min_size=size, max_size=size))))


names = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__")


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(codec="utf-8")), st.dictionaries(names, tensors(), max_size=4))
def test_round_trip(message: str, members: dict[str, TensorView]) -> None:
    container = decode(encode(message.encode(), members))
    assert container.message == message.encode()
    assert dict(container.tensors) == members


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_damage_is_a_codec_error_or_a_container(data: st.DataObject) -> None:
    body = bytearray(encode(b'{"a":1}', {"ids": TensorView.from_array(IDS), "rows": TensorView.from_array(ROWS)}))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        container = decode(body)
        assert sum(tensor.data.nbytes for tensor in container.tensors.values()) <= len(body)


def test_every_truncation_is_refused() -> None:
    body = encode(b"{}", {"rows": TensorView.from_array(ROWS)})
    for length in range(len(body)):
        with pytest.raises(CodecError):
            decode(body[:length])


def test_arrays_survive_without_a_copy() -> None:
    body = bytearray(encode(b"{}", {"rows": TensorView.from_array(ROWS), "ids": TensorView.from_array(IDS)}))
    container = decode(memoryview(body))
    rows = container.tensors["rows"].to_array()
    np.testing.assert_array_equal(rows, ROWS)
    np.testing.assert_array_equal(container.tensors["ids"].to_array(), IDS)
    body[-2:] = b"\x00\x3c"
    assert rows[-1, -1] == 1.0


def test_tensors_are_aligned_whatever_their_order() -> None:
    odd = np.zeros((1, 3), dtype=np.float16)
    body = encode(b"{}", {"a": TensorView.from_array(odd), "z": TensorView.from_array(IDS)})
    assert decode(body).tensors["z"].to_array().flags.aligned


def test_a_strided_array_is_copied() -> None:
    np.testing.assert_array_equal(TensorView.from_array(ROWS[:, ::2]).to_array(), ROWS[:, ::2])


def test_bfloat16_travels_as_bits() -> None:
    bits = np.array([0x3F80, 0x4000], dtype=np.uint16)
    view = decode(encode(b"{}", {"x": TensorView.from_array(bits, is_bfloat16=True)})).tensors["x"]
    assert view.dtype == "BF16"
    np.testing.assert_array_equal(view.to_array(), bits)


@pytest.mark.parametrize(("array", "is_bfloat16"), [(np.zeros(2), False), (np.zeros(2, np.uint16), False), (ROWS, True)])
def test_another_array_type_is_refused(array: np.ndarray[Any, Any], is_bfloat16: bool) -> None:
    with pytest.raises(CodecError, match="cannot be sent"):
        TensorView.from_array(array, is_bfloat16=is_bfloat16)


def test_the_safetensors_library_reads_ours() -> None:
    loaded = safetensors.numpy.load(encode(b"{}", {"rows": TensorView.from_array(ROWS), "ids": TensorView.from_array(IDS)}))
    np.testing.assert_array_equal(loaded["rows"], ROWS)
    np.testing.assert_array_equal(loaded["ids"], IDS)


def test_we_read_the_safetensors_library() -> None:
    container = decode(safetensors.numpy.save({"rows": ROWS, "ids": IDS}, metadata={"message": '{"é":1}'}))
    assert json.loads(container.message) == {"é": 1}
    np.testing.assert_array_equal(container.tensors["rows"].to_array(), ROWS)


META = {"__metadata__": {"message": "{}"}}
F32 = {"dtype": "F32", "shape": [1]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", "body", "truncated"),
        (b"\x01\x00", "body", "truncated"),
        (build({})[:-1], "body", "truncated"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "header", "claims"),
        (build(b"\xff\xfe"), "header", "not JSON"),
        (build(b"{"), "header", "not JSON"),
        (build(b"[" * 200_000), "header", "not JSON"),
        (build(b'{"__metadata__":' + b"9" * 5_000 + b"}"), "header", "not JSON"),
        (build([]), "header", "not a JSON object"),
        (build(b'{"x":1,"x":2}'), "header", "twice"),
        (build({}), "metadata.message", "no text"),
        (build({"__metadata__": {}}), "metadata.message", "no text"),
        (build({"__metadata__": {"message": 1}}), "metadata.message", "no text"),
        (build({"__metadata__": "message"}), "metadata.message", "no text"),
        (build(b'{"__metadata__":{"message":"\\ud800"}}'), "metadata.message", "Unicode"),
        (build({**META, "x": 1}), "tensors.x", "described by"),
        (build({**META, "x": F32}), "tensors.x", "described by"),
        (build(entry(more=1), bytes(8)), "tensors.x", "described by"),
        (build(entry(dtype="F64"), bytes(8)), "tensors.x.dtype", "F64"),
        (build(entry(dtype=[]), bytes(8)), "tensors.x.dtype", "list"),
        (build(entry(shape=2), bytes(8)), "tensors.x.shape", "not a list"),
        (build(entry(shape=[-2]), bytes(8)), "tensors.x.shape", "not a list"),
        (build(entry(shape=[True, 2]), bytes(8)), "tensors.x.shape", "not a list"),
        (build(entry(shape=[2.0]), bytes(8)), "tensors.x.shape", "not a list"),
        (build(entry(shape=[1 << 60, 0]), bytes(8)), "tensors.x.shape", "not a list"),
        (build(entry(shape=[1] * 9 + [2]), bytes(8)), "tensors.x.shape", "not a list"),
        (build(entry(offsets=[0]), bytes(8)), "tensors.x.data_offsets", "pair"),
        (build(entry(offsets=[0, "8"]), bytes(8)), "tensors.x.data_offsets", "pair"),
        (build(entry(offsets=[8, 0]), bytes(8)), "tensors.x.data_offsets", "out of range"),
        (build(entry(), bytes(7)), "tensors.x.data_offsets", "truncated"),
        (build(entry(offsets=[0, 4]), bytes(4)), "tensors.x.data_offsets", "needs 8 bytes; there are 4"),
        (build(entry(shape=[]), bytes(8)), "tensors.x.data_offsets", "needs 4 bytes"),
        (build(entry(), bytes(9)), "body", "1 trailing"),
        (build(META, bytes(3)), "body", "3 trailing"),
        (build(entry(offsets=[4, 12]), bytes(12)), "tensors.x.data_offsets", "hole"),
        (
            build({**META, "x": {**F32, "data_offsets": [0, 4]}, "y": {**F32, "data_offsets": [0, 4]}}, bytes(4)),
            "tensors.y.data_offsets",
            "overlaps",
        ),
    ],
)
def test_what_is_wrong_is_named(body: bytes, param: str, words: str) -> None:
    with pytest.raises(CodecError, match=words) as caught:
        decode(body)
    assert caught.value.param == param


def test_the_header_limit_is_the_callers() -> None:
    body = encode(b"x" * 100, {})
    assert decode(body, max_header_bytes=1_000).message == b"x" * 100
    with pytest.raises(CodecError, match="the limit is 100"):
        decode(body, max_header_bytes=100)


@pytest.mark.parametrize(
    ("message", "members", "param"),
    [
        (b"\xff", {}, "metadata.message"),
        (b"{}", {"__metadata__": TensorView.from_array(IDS)}, "tensors.__metadata__"),
        (b"{}", {"x": TensorView("I32", (4,), memoryview(bytes(12)))}, "tensors.x.data_offsets"),
        (b"{}", {"x": TensorView("I8", (4,), memoryview(bytes(4)))}, "tensors.x.dtype"),
    ],
)
def test_encode_refuses_what_decode_would(message: bytes, members: dict[str, TensorView], param: str) -> None:
    with pytest.raises(CodecError) as caught:
        encode(message, members)
    assert caught.value.param == param

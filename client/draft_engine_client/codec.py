"""The safetensors container of a message: a JSON document and, after it, the tensors that belong to it.

    8 bytes    length of the header, little endian
    header     JSON: {"__metadata__": {"message": "<JSON document>"}, "<name>": {"dtype", "shape", "data_offsets": [a, b)}, ...}
    data       the tensors, one after the other; offsets count from the first byte of data

Any safetensors reader can open a container. `decode` copies no tensor: a `TensorView` is a window on the body it came from.
It is fed by strangers, so a container must be exactly right: the tensors cover the data without hole, overlap or rest,
each has the bytes that its shape needs, and whatever is wrong is named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEDIA_TYPE = "application/vnd.safetensors"
MAX_HEADER_BYTES = 1 << 20

_METADATA_KEY = "__metadata__"
_MESSAGE_KEY = "message"
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 48
# bfloat16 is unknown to numpy, so its bits travel as uint16.
_NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4"), "I32": np.dtype("<i4")}
)
_NAMES_OF_DTYPES: Mapping[np.dtype[Any], str] = MappingProxyType(
    {dtype: name for name, dtype in _NUMPY_DTYPES.items() if name != "BF16"}
)


class CodecError(ValueError):
    """A container that cannot be read or written.

    Args:
        param: the part at fault: `body`, `header`, `metadata.message` or `tensors.<name>` with a field of it.
        message: one sentence for a person.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message


@dataclass(frozen=True)
class TensorView:
    """A tensor in somebody else's memory.

    Args:
        dtype: "F16", "BF16", "F32" or "I32".
        shape: its sizes; () is a scalar.
        data: its bytes in row-major, little-endian order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def from_array(cls, array: NDArray[Any], *, is_bfloat16: bool = False) -> TensorView:
        """View an array of float16, float32 or int32, or with `is_bfloat16` one of uint16 that holds the bits of bfloat16.

        An array that is not contiguous is copied.

        Raises:
            CodecError: the array is of another type.
        """
        name = "BF16" if is_bfloat16 and array.dtype == np.uint16 else _NAMES_OF_DTYPES.get(array.dtype)
        if name is None or (is_bfloat16 and name != "BF16"):
            raise CodecError("tensors.dtype", f"an array of {array.dtype} cannot be sent")
        return cls(name, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def to_array(self) -> NDArray[Any]:
        """View it as an array of its shape without a copy; bfloat16 becomes its uint16 bits."""
        return np.frombuffer(self.data, dtype=_NUMPY_DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True)
class Container:
    """A message and its tensors."""

    message: bytes
    tensors: Mapping[str, TensorView]


def encode(message: bytes, tensors: Mapping[str, TensorView]) -> bytes:
    """Pack a message (a JSON document) and its tensors into one body.

    Raises:
        CodecError: a tensor's bytes do not fit its shape, its dtype is unknown, or the message is not UTF-8.
    """
    try:
        text = message.decode()
    except UnicodeDecodeError as error:
        raise CodecError("metadata.message", "the message is not UTF-8") from error
    header: dict[str, Any] = {_METADATA_KEY: {_MESSAGE_KEY: text}}
    parts: list[bytes | memoryview] = [b"", b""]
    offset = 0
    # Wide types first: then every tensor starts at a multiple of its item size.
    for name, tensor in sorted(tensors.items(), key=_by_alignment):
        if name == _METADATA_KEY:
            raise CodecError(f"tensors.{name}", "this name is taken by the metadata")
        num_bytes = tensor.data.nbytes
        _check_byte_count(name, tensor.dtype, tensor.shape, num_bytes)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, offset + num_bytes)}
        parts.append(tensor.data)
        offset += num_bytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    parts[0], parts[1] = len(head).to_bytes(_LENGTH_BYTES, "little"), head
    return b"".join(parts)


def decode(body: bytes | bytearray | memoryview, *, max_header_bytes: int = MAX_HEADER_BYTES) -> Container:
    """Read a body without copying its tensors; they are valid as long as the body is left alone.

    Raises:
        CodecError: the body is not exactly one well-formed container with a message.
    """
    view = memoryview(body).cast("B")
    header, data = _split(view, max_header_bytes)
    message = _message(header)
    tensors: dict[str, TensorView] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == _METADATA_KEY:
            continue
        dtype, shape, begin, end = _entry(name, entry, len(data))
        tensors[name] = TensorView(dtype, shape, data[begin:end])
        spans.append((begin, end, name))
    _check_cover(spans, len(data))
    return Container(message, tensors)


def _by_alignment(item: tuple[str, TensorView]) -> tuple[int, str]:
    return -_item_size(*item), item[0]


def _item_size(name: str, tensor: TensorView) -> int:
    return _known_dtype(name, tensor.dtype).itemsize


def _known_dtype(name: str, dtype: object) -> np.dtype[Any]:
    known = _NUMPY_DTYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        shown = dtype if isinstance(dtype, str) and len(dtype) <= 16 else type(dtype).__name__
        raise CodecError(f"tensors.{name}.dtype", f"the dtype {shown} is not one of {', '.join(_NUMPY_DTYPES)}")
    return known


def _check_byte_count(name: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    needed = _known_dtype(name, dtype).itemsize * math.prod(shape)
    if num_bytes != needed:
        raise CodecError(
            f"tensors.{name}.data_offsets", f"{dtype} of shape {list(shape)} needs {needed} bytes; there are {num_bytes}"
        )


def _split(view: memoryview, max_header_bytes: int) -> tuple[dict[str, Any], memoryview]:
    if len(view) < _LENGTH_BYTES:
        raise CodecError(
            "body", f"the body is truncated: {len(view)} bytes, and the header's length alone takes {_LENGTH_BYTES}"
        )
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if length > max_header_bytes:
        raise CodecError("header", f"the header claims {length} bytes; the limit is {max_header_bytes}")
    if length > len(view) - _LENGTH_BYTES:
        raise CodecError("body", f"the body is truncated: the header claims {length} bytes, {len(view) - _LENGTH_BYTES} follow")
    try:
        header = json.loads(bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + length]), object_pairs_hook=_unique)
    except CodecError:
        raise
    except (ValueError, RecursionError) as error:
        raise CodecError("header", "the header is not JSON") from error
    if not isinstance(header, dict):
        raise CodecError("header", "the header is not a JSON object")
    return header, view[_LENGTH_BYTES + length :]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise CodecError("header", "the header has a key twice")
    return members


def _message(header: dict[str, Any]) -> bytes:
    metadata = header.get(_METADATA_KEY)
    text = metadata.get(_MESSAGE_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise CodecError("metadata.message", "the metadata has no text named message")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CodecError("metadata.message", "the message is not valid Unicode") from error


def _entry(name: str, entry: object, num_data_bytes: int) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CodecError(f"tensors.{name}", "a tensor is described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    _known_dtype(name, dtype)
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CodecError(f"tensors.{name}.shape", f"the shape is not a list of at most {_MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CodecError(f"tensors.{name}.data_offsets", "the offsets are not a pair of byte positions")
    begin, end = offsets
    if not begin <= end <= num_data_bytes:
        raise CodecError(
            f"tensors.{name}.data_offsets",
            f"bytes [{begin}, {end}) are out of range: the body is truncated or wrong, it has {num_data_bytes} bytes of data",
        )
    _check_byte_count(name, dtype, tuple(shape), end - begin)
    return dtype, tuple(shape), begin, end


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _MAX_SIZE for value in values)


def _check_cover(spans: list[tuple[int, int, str]], num_data_bytes: int) -> None:
    """Insist that the tensors cover [0, num_data_bytes) once."""
    covered = 0
    for begin, end, name in sorted(spans):
        if begin != covered:
            what = "overlaps the tensor before it" if begin < covered else "leaves a hole before it"
            raise CodecError(f"tensors.{name}.data_offsets", f"the tensor at bytes [{begin}, {end}) {what}")
        covered = end
    if covered != num_data_bytes:
        raise CodecError("body", f"the body has {num_data_bytes - covered} trailing bytes after the last tensor")

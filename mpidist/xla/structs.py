"""The C structs by which XLA calls a function: those of the header that jaxlib brings, in ctypes."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

_Pointer = ctypes.c_void_p
_Size = ctypes.c_size_t


class Extension(ctypes.Structure):
    """An addition to a struct: a question about the function itself, for instance."""

    _fields_ = (("struct_size", _Size), ("type", ctypes.c_int), ("next", _Pointer))


class ApiVersion(ctypes.Structure):
    """The version of the interface that a function was written for."""

    _fields_ = (
        ("struct_size", _Size), ("extension_start", _Pointer), ("major_version", ctypes.c_int),
        ("minor_version", ctypes.c_int),
    )


class Metadata(ctypes.Structure):
    """The answer of a function that is registered."""

    _fields_ = (("struct_size", _Size), ("api_version", ApiVersion), ("traits", ctypes.c_uint32))


class MetadataExtension(ctypes.Structure):
    """The extension of a call that asks for `Metadata`, and wants nothing done."""

    _fields_ = (("extension_base", Extension), ("metadata", ctypes.POINTER(Metadata)))


class Buffer(ctypes.Structure):
    """An array, in C order."""

    _fields_ = (
        ("struct_size", _Size), ("extension_start", _Pointer), ("dtype", ctypes.c_int), ("data", _Pointer),
        ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class Arguments(ctypes.Structure):
    """The operands of a call; `types` says of each that it is a buffer."""

    _fields_ = (
        ("struct_size", _Size), ("extension_start", _Pointer), ("size", ctypes.c_int64), ("types", _Pointer),
        ("args", ctypes.POINTER(ctypes.POINTER(Buffer))),
    )


class Results(ctypes.Structure):
    """The results of a call."""

    _fields_ = (
        ("struct_size", _Size), ("extension_start", _Pointer), ("size", ctypes.c_int64), ("types", _Pointer),
        ("rets", ctypes.POINTER(ctypes.POINTER(Buffer))),
    )


class ErrorArguments(ctypes.Structure):
    """The arguments of the function that makes an error."""

    _fields_ = (
        ("struct_size", _Size), ("extension_start", _Pointer), ("message", ctypes.c_char_p), ("errc", ctypes.c_int),
    )


MakeError = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(ErrorArguments))


class Api(ctypes.Structure):
    """XLA's functions that a called function may call, as far as ours does."""

    _fields_ = (
        ("struct_size", _Size), ("extension_start", _Pointer), ("api_version", ApiVersion), ("internal_api", _Pointer),
        ("XLA_FFI_Error_Create", MakeError),
    )


class CallFrame(ctypes.Structure):
    """One call, without its attributes."""

    _fields_ = (
        ("struct_size", _Size), ("extension_start", ctypes.POINTER(Extension)), ("api", ctypes.POINTER(Api)),
        ("ctx", _Pointer), ("stage", ctypes.c_int), ("args", Arguments), ("rets", Results),
    )


Handler = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(CallFrame))

METADATA_EXTENSION = 1
EXECUTE_STAGE = 3
INTERNAL_ERROR = 13
DTYPES = {
    number: np.dtype(dtype)
    for number, dtype in {
        1: np.bool_, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.uint8, 7: np.uint16, 8: np.uint32,
        9: np.uint64, 10: np.float16, 11: np.float32, 12: np.float64, 15: np.complex64, 16: ml_dtypes.bfloat16,
        18: np.complex128, 19: ml_dtypes.float8_e5m2, 20: ml_dtypes.float8_e4m3fn,
    }.items()
}

_OF_HEADER = {
    "XLA_FFI_Extension_Base": Extension, "XLA_FFI_Api_Version": ApiVersion, "XLA_FFI_Metadata": Metadata,
    "XLA_FFI_Metadata_Extension": MetadataExtension, "XLA_FFI_Buffer": Buffer, "XLA_FFI_Args": Arguments,
    "XLA_FFI_Rets": Results, "XLA_FFI_Error_Create_Args": ErrorArguments, "XLA_FFI_Api": Api,
    "XLA_FFI_CallFrame": CallFrame,
}
_CONSTANTS = {
    "XLA_FFI_Extension_Metadata": METADATA_EXTENSION, "XLA_FFI_ExecutionStage_EXECUTE": EXECUTE_STAGE,
    "XLA_FFI_Error_Code_INTERNAL": INTERNAL_ERROR, "XLA_FFI_DataType_F32": 11, "XLA_FFI_DataType_BF16": 16,
}


def read_header() -> str:
    """Local. The text of the C header that jaxlib brings."""
    return (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()


def version_of(header: str) -> tuple[int, int]:
    """Local. The version of the interface, major and minor.

    Raises:
        RuntimeError: The header, or a struct in it, is not as this module has it.
    """
    for name, structure in _OF_HEADER.items():
        expected = [field[0] for field in structure._fields_]
        found = _fields_of(header, name)
        if found[: len(expected)] != expected:
            raise RuntimeError(f"expected a struct {name} that begins with {expected}, got {found} in jaxlib's c_api.h")
    for name, value in _CONSTANTS.items():
        if not re.search(rf"\b{name} = {value}\b", header):
            raise RuntimeError(f"expected {name} = {value} in jaxlib's c_api.h")
    return _number(header, "MAJOR"), _number(header, "MINOR")


def _fields_of(header: str, name: str) -> list[str]:
    body = re.search(rf"struct {name} \{{(.*?)\n\}}", header, re.DOTALL)
    if body is None:
        return []
    code = re.sub(r"//.*", "", body.group(1))
    return re.findall(r"(\w+)\)?;", code)


def _number(header: str, which: str) -> int:
    found = re.search(rf"#define XLA_FFI_API_{which} (\d+)", header)
    if found is None:
        raise RuntimeError(f"expected a line `#define XLA_FFI_API_{which}` in jaxlib's c_api.h")
    return int(found.group(1))

"""A Python function that XLA calls by its foreign function interface, without a compiler in between."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from mpidist.arrays import AnyArray
from mpidist.errors import note_interrupt
from mpidist.xla import pages, structs

Work = Callable[[list[AnyArray], list[AnyArray]], None]

# XLA keeps the address of a registered function until the process ends, so the object behind it must live as long.
_kept: list[Any] = []


def register(name: str, work: Work, *, is_aliased: bool, operand_count: int | None = None) -> None:
    """Local. Make a function callable from compiled programs on CPUs, under a name that is new.

    Args:
        name: The name of the target.
        work: Gets the operands and the results of a call as NumPy views of XLA's memory, on any thread. An exception
            becomes an error of the program, with its traceback.
        is_aliased: Each result has its operand's memory, and begins with its values; there may be more operands. Where
            XLA has given it other memory, the values are copied before `work` is called.
        operand_count: `work` gets so many of the operands only; the others are for the order.
    """
    major, minor = _version()
    # The process's own type objects, not those of each call.
    frame_type, null = structs.MetadataExtension, None

    def called(frame: Any) -> Any:
        call = frame.contents
        try:
            extension = call.extension_start
            if extension and extension.contents.type == structs.METADATA_EXTENSION:
                asked = ctypes.cast(extension, ctypes.POINTER(frame_type)).contents.metadata.contents
                asked.api_version.major_version, asked.api_version.minor_version = major, minor
                asked.traits = 0
            elif call.stage == structs.EXECUTE_STAGE:
                _work(call, work, is_aliased, operand_count)
        # XLA's C++ is the caller: an exception that left this function would be printed and forgotten.
        except BaseException as error:
            return _error(call.api.contents, error)
        return null

    function = structs.Handler(called)
    _kept.append(function)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu", api_version=1)


@lru_cache
def _version() -> tuple[int, int]:
    return structs.version_of(structs.read_header())


def _work(call: structs.CallFrame, work: Work, is_aliased: bool, operand_count: int | None) -> None:
    args, rets = call.args, call.rets
    operands = [args.args[i].contents for i in range(args.size if operand_count is None else operand_count)]
    results = [rets.rets[i].contents for i in range(rets.size)]
    outputs = [_view(buffer) for buffer in results]
    if not is_aliased:
        work([_view(buffer) for buffer in operands], outputs)
        return
    inputs = []
    for operand, result, output in zip(operands, results, outputs, strict=False):
        if operand.data == result.data:
            inputs.append(output)
        else:
            inputs.append(_view(operand))
            np.copyto(output, inputs[-1])
    inputs.extend(_view(buffer) for buffer in operands[len(results):])
    work(inputs, outputs)


def _view(buffer: structs.Buffer) -> AnyArray:
    """The memory of a buffer as an array."""
    dtype = structs.DTYPES.get(buffer.dtype)
    if dtype is None:
        raise TypeError(
            f"expected arrays of a dtype that NumPy has, got number {buffer.dtype} of XLA's (enum XLA_FFI_DataType of "
            "its c_api.h). Convert them with `.astype` before the call"
        )
    shape = buffer.dims[: buffer.rank]
    size = dtype.itemsize
    for length in shape:
        size *= length
    if not size:
        return np.empty(shape, dtype)
    if size >= pages.LARGE_BYTES:
        pages.ask_for_large_pages(buffer.data, size)
    array: AnyArray = np.frombuffer(_bytes_type(size).from_address(buffer.data), dtype).reshape(shape)
    return array


@lru_cache(maxsize=4096)
def _bytes_type(size: int) -> Any:
    return ctypes.c_char * size


def _error(api: structs.Api, error: BaseException) -> Any:
    """An error of XLA with a traceback; XLA copies the text and owns the error."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, KeyboardInterrupt):
        # A program that runs on the thread of its caller: JAX raises another error there.
        note_interrupt(text)
    arguments = structs.ErrorArguments(
        ctypes.sizeof(structs.ErrorArguments), None, text.encode(), structs.INTERNAL_ERROR
    )
    return api.XLA_FFI_Error_Create(ctypes.byref(arguments))

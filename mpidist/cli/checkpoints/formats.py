"""Files of other libraries: arrays by name, read and written by NumPy, safetensors, PyTorch and h5py."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from mpidist.arrays import AnyArray
from mpidist.checkpoint.file.layout import OF_ML_DTYPES
from mpidist.comm.arithmetic.combine import named_dtype

Arrays = dict[str, AnyArray]
Notes = dict[str, str]

# The names of dtypes in safetensors that its functions for NumPy do not know.
_OF_SAFETENSORS = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "U64": "uint64", "I32": "int32",
    "U32": "uint32", "I16": "int16", "U16": "uint16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}


def library(name: str) -> Any:
    """Local. Load the library of a file.

    Raises:
        ValueError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ValueError(
            f"such files need the package {package}, which cannot be loaded ({error}): pip install {package}"
        ) from None


def read_npz(path: str) -> tuple[Arrays, Notes]:
    """Local. The arrays of a file of `numpy.savez`; objects are left out."""
    found: Arrays = {}
    notes: Notes = {}
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            try:
                array = file[name]
            except ValueError as error:
                notes[name] = f"left out: {error}"
                continue
            if array.dtype.kind in "biufc":
                found[name] = array
            else:
                notes[name] = f"left out, since its dtype is {array.dtype}, no number"
    return found, notes


def write_npz(path: str, given: Mapping[str, AnyArray]) -> Notes:
    """Local. Write a file for `numpy.load`, which knows no bfloat16 and float8: those become float32."""
    notes: Notes = {}
    # Not by `numpy.savez`: an array may have the name of one of its arguments.
    with zipfile.ZipFile(path, "w") as archive:
        for name, given_array in given.items():
            array = given_array
            if array.dtype.isbuiltin == OF_ML_DTYPES:
                array = array.astype(np.float32)
                notes[name] = f"{given_array.dtype} became float32, with the same values"
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return notes


def read_safetensors(path: str) -> tuple[Arrays, Notes]:
    """Local. The arrays of a file of safetensors."""
    safetensors = library("safetensors")
    with open(path, "rb") as file:
        content = file.read()
    found = {}
    try:
        entries = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path!r} is no file of safetensors: {error}") from None
    for name, entry in entries:
        if entry["dtype"] not in _OF_SAFETENSORS:
            raise ValueError(f"{path!r}: {name!r} has a dtype that a checkpoint cannot hold: {entry['dtype']}")
        dtype = named_dtype(_OF_SAFETENSORS[entry["dtype"]])
        found[name] = np.frombuffer(bytearray(entry["data"]), dtype).reshape(entry["shape"])
    return found, {}


def write_safetensors(path: str, given: Mapping[str, AnyArray]) -> Notes:
    """Local. Write a file of safetensors."""
    plain = {name: np.array(array, order="C") for name, array in given.items()}
    try:
        library("safetensors.numpy").save_file(plain, path)
    except library("safetensors").SafetensorError as error:
        raise ValueError(f"safetensors cannot hold one of the arrays: {error}") from None
    return {}


def read_torch(path: str) -> tuple[Arrays, Notes]:
    """Local. The tensors and numbers of a file of `torch.save`, a state_dict or dictionaries of them."""
    torch = library("torch")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path!r} cannot be read by torch.load with weights_only=True: {error}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"expected {path!r} to hold a state_dict, got {type(content).__name__}")
    found: Arrays = {}
    notes: Notes = {}
    for name, value in _flat(content, ""):
        if isinstance(value, torch.Tensor):
            found[name] = _host_array(torch, name, value.detach())
        elif isinstance(value, (bool, int, float, complex)):
            found[name] = np.asarray(value)
        else:
            notes[name] = f"left out, since it is {type(value).__name__}, no tensor"
    return found, notes


def _host_array(torch: Any, name: str, tensor: Any) -> AnyArray:
    try:
        dtype = named_dtype(str(tensor.dtype).rpartition(".")[2])
        if dtype.isbuiltin == OF_ML_DTYPES:
            bits = tensor.contiguous().view(torch.int8 if dtype.itemsize == 1 else torch.int16)
            return np.array(bits.numpy()).view(dtype)
        return np.array(tensor.resolve_conj().resolve_neg().numpy())
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name!r}: a checkpoint cannot hold a tensor of {tensor.dtype}: {error}") from None


def write_torch(path: str, given: Mapping[str, AnyArray]) -> Notes:
    """Local. Write a dictionary of tensors, as a state_dict is one, for `torch.load`."""
    torch = library("torch")
    tensors = {}
    for name, array in given.items():
        if array.dtype.isbuiltin == OF_ML_DTYPES:
            kind = getattr(torch, array.dtype.name, None)
            if kind is None:
                raise ValueError(f"{name!r}: PyTorch has no dtype {array.dtype}")
            bits = np.array(array, order="C").view(f"i{array.dtype.itemsize}")
            tensors[name] = torch.from_numpy(bits).view(kind)
        else:
            tensors[name] = torch.from_numpy(np.array(array, order="C"))
    torch.save(tensors, path)
    return {}


def read_keras(path: str) -> tuple[Arrays, Notes]:
    """Local. The arrays of a file of `model.save_weights`, by their places in it: `layers/dense/vars/0`."""
    found: Arrays = {}

    def take(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            array = item[()]
            kind = item.attrs.get("dtype")
            found[name] = np.asarray(array) if kind is None else np.asarray(array).view(named_dtype(str(kind)))

    with h5py.File(path, "r") as file:
        file.visititems(take)
    return found, {}


def write_keras(path: str, given: Mapping[str, AnyArray]) -> Notes:
    """Local. Write a file for `model.load_weights`."""
    with h5py.File(path, "w") as file:
        for name, array in given.items():
            if array.dtype.isbuiltin == OF_ML_DTYPES:
                # As Keras does.
                file.create_dataset(name, data=array.view(f"V{array.dtype.itemsize}")).attrs["dtype"] = array.dtype.name
            else:
                file.create_dataset(name, data=array)
    return {}


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, (list, tuple)):
        children = dict(enumerate(value)).items()
    else:
        yield name, value
        return
    for key, child in children:
        yield from _flat(child, f"{name}.{key}" if name else str(key))

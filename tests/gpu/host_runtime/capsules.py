"""Functions of CuPy's compiled modules, replaced by functions of Python before other modules of CuPy take them.

Cython modules find each other's functions in `__pyx_capi__`, as capsules that are named after the function's signature.
A replacement has the same name; one whose number of arguments is not that of the signature fails at once.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

_api = ctypes.pythonapi
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetName.argtypes = [ctypes.py_object]
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_TYPES: dict[str, Any] = {
    "PyObject *": ctypes.py_object, "intptr_t": ctypes.c_ssize_t, "size_t": ctypes.c_size_t, "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint, "PY_LONG_LONG": ctypes.c_longlong,
}
# Capsules hold addresses only.
_kept: list[object] = []
# Holds something when the program has ended: then nothing is done any more.
_ended: list[bool] = []
# The first that is registered is the last that runs.
atexit.register(_ended.append, True)


def replace(module: ModuleType, function: Callable[..., Any], name: str = "") -> None:
    """Put a function in the place of the module's function of the same name, for Cython and for Python."""
    name = name or function.__name__
    capsule = module.__pyx_capi__[name]
    signature = _api.PyCapsule_GetName(capsule)
    result, _, listed = signature.decode().rstrip(")").partition("(")
    given = [_without_name(one) for one in listed.split(", ") if one and one != "void"]
    own = [one for one in given if one != "__pyx_skip_dispatch" and "opt_args" not in one]
    wanted = inspect.signature(function).parameters.values()
    if len(own) > len(wanted) or len(own) < sum(one.default is one.empty for one in wanted):
        raise TypeError(f"{module.__name__}.{name} of this CuPy is {signature.decode()}, and the test's {function}")
    types = [ctypes.c_void_p if "opt_args" in one else _TYPES[one.replace("__pyx_skip_dispatch", "int")]
             for one in given]
    count = len(own)

    nothing = None if result.strip() == "PyObject *" else 0

    def call(*arguments: Any, ended: list[bool] = _ended) -> Any:
        if ended:
            return nothing
        # An error comes to `sys.unraisablehook`, where pytest makes it a failure, and to the caller as a SystemError.
        return function(*arguments[:count])

    c_function = ctypes.PYFUNCTYPE(_TYPES[result.strip()], *types)(call)
    buffer = ctypes.create_string_buffer(signature)
    module.__pyx_capi__[name] = _api.PyCapsule_New(
        ctypes.cast(c_function, ctypes.c_void_p), ctypes.cast(buffer, ctypes.c_char_p), None
    )
    _kept.extend((c_function, buffer, module.__pyx_capi__[name]))
    # CuPy frees memory when the interpreter takes modules apart, after this one.
    for one in (c_function, call, buffer):
        _api.Py_IncRef(ctypes.py_object(one))
    setattr(module, name, function)


def _without_name(argument: str) -> str:
    return re.sub(r"^int __pyx_skip_dispatch$", "__pyx_skip_dispatch", argument.strip())

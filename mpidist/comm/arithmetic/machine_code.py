"""Machine code from LLVM's text, for this machine's processor, by llvmlite; the only module that imports it.

A function takes some ten milliseconds to compile, less than a file of the code would take to be found, checked and
loaded by all ranks of a node. Therefore nothing is kept on a disk, where it could be of another machine, or of another
user.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite
import llvmlite.binding as llvm

# Compiling is not for several threads at the same time.
_lock = threading.Lock()
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

version = f"LLVM {'.'.join(map(str, llvm.llvm_version_info))} (llvmlite {llvmlite.__version__})"


class MachineCode:
    """A function that was compiled. Calls release the interpreter's lock.

    Args:
        text: The text of a module, in LLVM's language.
        name: The name of the function in it; it returns nothing.
        arguments: The types of its arguments.

    Attributes:
        call: The function. Arrays are given as addresses.
        assembly: The instructions, for people and tests.
    """

    def __init__(self, text: str, name: str, arguments: Sequence[Any]) -> None:
        with _lock:
            target = llvm.Target.from_default_triple()
            machine = target.create_target_machine(
                cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
            )
            module = llvm.parse_assembly(text)
            module.triple, module.data_layout = target.triple, str(machine.target_data)
            module.verify()
            options = llvm.create_pipeline_tuning_options(speed_level=3)
            options.loop_vectorization = options.loop_unrolling = True
            passes = llvm.create_pass_builder(machine, options)
            passes.getModulePassManager().run(module, passes)
            self._module_text = str(module)
            # It owns the code.
            self._engine = llvm.create_mcjit_compiler(module, machine)
            self._engine.finalize_object()
            address = self._engine.get_function_address(name)
        self._machine = machine
        self.call: Callable[..., None] = ctypes.CFUNCTYPE(None, *arguments)(address)

    @property
    def assembly(self) -> str:
        """Local. The instructions, for people and tests."""
        with _lock:
            return str(self._machine.emit_assembly(llvm.parse_assembly(self._module_text)))

"""The text, in LLVM's language, of a loop that adds up gradients and does a recorded update, element by element.

Every operation is rounded by itself, in the dtype of the blocks: there is no flag that lets LLVM reorder, contract or
approximate. Therefore results have the bits that NumPy gives, but for the payload of NaNs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm.arithmetic.compiler import loop_text, rows_text
from mpidist.variables.update.fused import Program, Statement, UnknownOperationError

# LLVM's names of a type, and of its variants of functions.
TYPES = {"f": ("float", "f32"), "d": ("double", "f64")}
# One instruction on operands of one type.
_INSTRUCTIONS = {
    "add": "fadd {T} {0}, {1}",
    "subtract": "fsub {T} {0}, {1}",
    "multiply": "fmul {T} {0}, {1}",
    "divide": "fdiv {T} {0}, {1}",
    "negative": "fneg {T} {0}",
    "square": "fmul {T} {0}, {0}",
    "reciprocal": "fdiv {T} 1.0, {0}",
    "absolute": "call {T} @llvm.fabs.{S}({T} {0})",
    "sqrt": "call {T} @llvm.sqrt.{S}({T} {0})",
}
# The first operand stays where it is a NaN, or where this comparison of both holds; else it becomes the second.
_EXTREMES = {"maximum": "ogt", "minimum": "olt"}
# The halves of a clip: the value becomes the limit where the limit is a NaN, or where this comparison of both holds.
_LIMITS = {"raise to": "olt", "lower to": "ogt"}
_COMPARISONS = {
    "equal": "oeq", "not_equal": "une", "less": "olt", "less_equal": "ole", "greater": "ogt", "greater_equal": "oge",
}


class Loop(NamedTuple):
    """The facts on which the text depends.

    Attributes:
        names, loaded, stored, statements: The fields of the `Program`.
        scalar_count: The number of its numbers.
        type: "f" or "d", NumPy's character for the dtype of the blocks.
        gradient_count: Number of gradients that are added up.
        pairs: Their order: of each pair the sum takes the place of the first, and the last sum is at 0.
        is_aside: Whether the new parameter is stored to another array than that from which it is loaded.
        is_of_rows: Whether only some rows of parameter and state are updated; the gradient has these rows alone, and
            takes the new parameter if that is stored elsewhere.
    """

    names: tuple[str, ...]
    loaded: tuple[str, ...]
    stored: tuple[str, ...]
    statements: tuple[Statement, ...]
    scalar_count: int
    type: str
    gradient_count: int
    pairs: tuple[tuple[int, int], ...]
    is_aside: bool
    is_of_rows: bool = False

    def arrays(self) -> list[str]:
        """Local. The names of the arrays in the order of the function's arguments."""
        result: list[str] = []
        for name in self.names:
            result += [f"g{number}" for number in range(self.gradient_count)] if name == "g" else [name]
        return ["q", *result] if self.is_aside and not self.is_of_rows else result


def loop_of(
    program: Program, dtype: np.dtype[Any], pairs: Sequence[tuple[int, int]] = (), *, is_aside: bool = False,
    is_of_rows: bool = False,
) -> Loop:
    """Local. The loop of a program.

    Args:
        program: The program.
        dtype: The dtype of the blocks.
        pairs: The order in which gradients are added up; there is one more of them.
        is_aside: Whether the new parameter is written to another array.
        is_of_rows: Whether only some rows are updated.

    Raises:
        UnknownOperationError: A compiled loop cannot give NumPy's result: the program has a power, exponential,
            logarithm or hyperbolic tangent, or numbers of a wider dtype, or the dtype is not that of one of the
            machine's numbers.
    """
    if dtype.char not in TYPES or not dtype.isnative:
        raise UnknownOperationError(f"blocks of dtype {dtype}")
    if program.widens:
        raise UnknownOperationError("a number of a wider dtype than the blocks")
    loop = Loop(
        program.names, program.loaded, program.stored, program.statements, len(program.scalars), dtype.char,
        len(pairs) + 1, tuple(pairs), is_aside, is_of_rows,
    )
    if "g" in loop.stored and pairs:
        raise UnknownOperationError("the sum of several gradients is read later")
    return loop


class _Writer:
    """The lines of one iteration, and LLVM's value for each name."""

    def __init__(self, loop: Loop) -> None:
        self.lines: list[str] = []
        self.type, self._suffix = TYPES[loop.type]
        self.values = {f"k{number}": f"%k{number}" for number in range(loop.scalar_count)}
        self._count = 0

    def value(self, instruction: str) -> str:
        """Local. Write an instruction; returns the name of its result."""
        self._count += 1
        self.lines.append(f"  %v{self._count} = {instruction}")
        return f"%v{self._count}"

    def choose(self, condition: str, one: str, other: str) -> str:
        """Local. Write the choice of a value."""
        return self.value(f"select i1 {condition}, {self.type} {one}, {self.type} {other}")

    def compare(self, comparison: str, left: str, right: str) -> str:
        """Local. Write a comparison."""
        return self.value(f"fcmp {comparison} {self.type} {left}, {right}")

    def write(self, statement: Statement) -> None:
        """Local. Write a statement of the program."""
        target, operation, names = statement
        operands = [self.values[name] for name in names]
        self.values[target] = self._result(operation, operands)

    def _result(self, operation: str, operands: list[str]) -> str:
        if operation in ("copy", "positive"):
            return operands[0]
        if operation in _INSTRUCTIONS:
            return self.value(_INSTRUCTIONS[operation].format(*operands, T=self.type, S=self._suffix))
        if operation in _EXTREMES:
            if not extremes_are_known():
                raise UnknownOperationError(f"np.{operation}, which chooses another zero here")
            is_nan, holds = self.compare("uno", operands[0], operands[0]), self.compare(_EXTREMES[operation], *operands)
            return self.choose(self.value(f"or i1 {is_nan}, {holds}"), *operands)
        if operation in _LIMITS:
            is_nan, holds = self.compare("uno", operands[1], operands[1]), self.compare(_LIMITS[operation], *operands)
            return self.choose(self.value(f"or i1 {is_nan}, {holds}"), operands[1], operands[0])
        if operation == "sign":
            # NaNs stay, and both zeros become the positive one.
            (given,) = operands
            result = self.choose(self.compare("oeq", given, "0.0"), "0.0", given)
            result = self.choose(self.compare("olt", given, "0.0"), "-1.0", result)
            return self.choose(self.compare("ogt", given, "0.0"), "1.0", result)
        kind, _, comparison = operation.partition(" ")
        if kind == "where":
            return self.choose(self.compare(_COMPARISONS[comparison], *operands[:2]), *operands[2:])
        raise UnknownOperationError(f"np.{operation}, whose last bit is that of a library")


def text_of(loop: Loop) -> str:
    """Local. The text of a module with one function of a count, arrays and numbers.

    No two of its arrays may overlap. Each has `count` elements. If it is one of rows, the arguments are a count and a
    width, the numbers of the rows (increasing, of 64 bits), and as above: the gradient has `count` rows.

    Raises:
        UnknownOperationError: See `loop_of`.
    """
    writer = _Writer(loop)
    kind, suffix = TYPES[loop.type]
    origin, element = ("row", "%j") if loop.is_of_rows else ("a", "%i")
    for name in loop.arrays():
        writer.lines.append(f"  %at_{name} = getelementptr inbounds {kind}, ptr %{origin}_{name}, i64 {element}")
    for name in loop.loaded:
        if name != "g":
            writer.values[name] = writer.value(f"load {kind}, ptr %at_{name}")
    if "g" in loop.loaded:
        gradients = [writer.value(f"load {kind}, ptr %at_g{number}") for number in range(loop.gradient_count)]
        for left, right in loop.pairs:
            gradients[left] = writer.value(f"fadd {kind} {gradients[left]}, {gradients[right]}")
        writer.values["g"] = gradients[0]
    for statement in loop.statements:
        writer.write(statement)
    aside = "g0" if loop.is_of_rows else "q"
    targets = {"g": "g0", **({"p": aside} if loop.is_aside else {})}
    for name in loop.stored:
        if name == "g" and targets.get("p") == "g0":
            continue
        writer.lines.append(f"  store {kind} {writer.values[name]}, ptr %at_{targets.get(name, name)}")
    arguments = [
        *(f"ptr noalias %a_{name}" for name in loop.arrays()),
        *(f"{kind} %k{number}" for number in range(loop.scalar_count)),
    ]
    declared = [f"declare {kind} @llvm.{name}.{suffix}({kind})" for name in ("sqrt", "fabs")]
    if loop.is_of_rows:
        text = rows_text(", ".join(["ptr noalias %rows", *arguments]), _rows_of(loop, kind), writer.lines)
    else:
        text = loop_text(", ".join(arguments), writer.lines)
    return "\n".join([*declared, text])


def _rows_of(loop: Loop, kind: str) -> list[str]:
    """The lines that find the row of each array."""
    lines = [
        "  %at_rows = getelementptr inbounds i64, ptr %rows, i64 %i", "  %number = load i64, ptr %at_rows",
        "  %there = mul nsw i64 %number, %width", "  %here = mul nsw i64 %i, %width",
    ]
    for name in loop.arrays():
        begin = "%here" if name.startswith("g") else "%there"
        lines.append(f"  %row_{name} = getelementptr inbounds {kind}, ptr %a_{name}, i64 {begin}")
    return lines


@functools.cache
def extremes_are_known() -> bool:
    """Local. Whether NumPy, on this machine, gives the second operand for the extremes of two zeros.

    It does with the x86's instructions. With others it may prefer one of the zeros, or differ with the length.
    """
    for kind in TYPES:
        for count in (1, 3, 67):
            positive = np.zeros(count, kind)
            negative = np.negative(positive)
            for extreme in (np.maximum, np.minimum):
                if np.signbit(extreme(negative, positive)).any() or not np.signbit(extreme(positive, negative)).all():
                    return False
    return True

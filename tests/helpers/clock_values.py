"""Which expressions of a program hold a time: a moment of a clock, or the seconds between two."""

from __future__ import annotations

import ast
from typing import NamedTuple

_CLOCKS = frozenset(
    f"{name}{unit}" for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
)
# Helpers of tests that return seconds.
_SECONDS = frozenset({"seconds_since_begin"})
# What gives one of its arguments, or nearly so.
_THROUGH = frozenset({"int", "float", "round", "max", "min", "abs", "sum", "sorted", "list", "tuple"})
# What tells how many there are.
_COUNTS = frozenset({"len", "range", "enumerate", "str", "repr", "sleep", "wait", "Thread", "Timer"})
_NOW = 10**9


class Value(NamedTuple):
    """What is known of an expression.

    Attributes:
        moment: When the clock was read: a line, or `_NOW` in the expression itself; 0 where this is no moment.
        is_limit: Whether it is a moment and some seconds.
        sign: 1 for seconds that grow with the time, -1 for those that are left, 0 where these are no seconds.
        parts: Those of a tuple.
    """

    moment: int = 0
    is_limit: bool = False
    sign: int = 0
    parts: tuple[Value, ...] = ()

    @property
    def is_time(self) -> bool:
        return bool(self.moment or self.sign or any(one.is_time for one in self.parts))


NOTHING = Value()


def names_of_clocks(tree: ast.Module) -> frozenset[str]:
    """How this program calls its clocks, as `ast.unparse` writes them."""
    names = set()
    modules = {"time"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name == "time" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            names |= {alias.asname or alias.name for alias in node.names if alias.name in _CLOCKS}
    return frozenset(names | {f"{module}.{clock}" for module in modules for clock in _CLOCKS} | {"MPI.Wtime"})


class Scope:
    """The values of a program's names, by function and line; a name has the value that it was given last above."""

    def __init__(self, tree: ast.Module, parents: dict[ast.AST, ast.AST], clocks: frozenset[str]) -> None:
        self._parents = parents
        self._clocks = clocks
        self._given: dict[tuple[ast.AST, str], list[tuple[int, ast.expr | None, int]]] = {}
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._asked: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._give(target, node.value, node)
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                self._give(node.target, node.value, node)
            elif isinstance(node, (ast.For, ast.comprehension)):
                self._give(node.target, node.iter, node)

    def value(self, node: ast.AST | None) -> Value:
        """What is known of an expression."""
        if node is None or node in self._asked:
            return NOTHING
        self._asked.add(node)
        try:
            return self._value(node)
        finally:
            self._asked.discard(node)

    def has_clock(self, node: ast.AST) -> bool:
        """Whether a part of an expression is a time."""
        return any(self.value(one).is_time for one in ast.walk(node) if isinstance(one, ast.expr))

    def _give(self, target: ast.expr, value: ast.expr, node: ast.AST) -> None:
        holder, line = self._function_of(node), getattr(node, "lineno", target.lineno)
        if isinstance(target, ast.Name):
            self._given.setdefault((holder, target.id), []).append((line, value, -1))
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
            for at, one in enumerate(target.elts):
                if values is not None:
                    self._give(one, values[at], node)
                elif isinstance(one, ast.Name):
                    self._given.setdefault((holder, one.id), []).append((line, value, at))

    def _function_of(self, node: ast.AST) -> ast.AST:
        while (parent := self._parents.get(node)) is not None:
            node = parent
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                return node
        return node

    def _value(self, node: ast.AST) -> Value:
        if isinstance(node, ast.Name):
            return self._named(node)
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.BinOp):
            return _combined(node.op, self.value(node.left), self.value(node.right), node.right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return Value(sign=-self.value(node.operand).sign)
        if isinstance(node, (ast.Tuple, ast.List)):
            return Value(parts=tuple(map(self.value, node.elts)))
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            return Value(parts=(self.value(node.elt),))
        if isinstance(node, ast.IfExp):
            return _first(self.value(node.body), self.value(node.orelse))
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.Starred):
            return self.value(node.value)
        return NOTHING

    def _named(self, node: ast.Name) -> Value:
        holder: ast.AST = node
        while True:
            holder = self._function_of(holder)
            given = self._given.get((holder, node.id), [])
            above = [one for one in given if one[0] <= node.lineno] or given
            if above:
                line, expression, at = max(above, key=lambda one: one[0])
                found = self.value(expression)
                if at >= 0:
                    found = found.parts[at] if at < len(found.parts) else NOTHING
                elif found.parts and self._is_iterated(expression):
                    found = _first(*found.parts)
                return found._replace(moment=line) if found.moment else found
            if isinstance(holder, ast.Module):
                return NOTHING

    def _item(self, node: ast.Subscript) -> Value:
        parts, at = self.value(node.value).parts, node.slice
        if isinstance(at, ast.Constant) and isinstance(at.value, int) and at.value < len(parts):
            return parts[at.value]
        return _first(*parts)

    def _is_iterated(self, expression: ast.expr | None) -> bool:
        parent = self._parents.get(expression) if expression is not None else None
        return isinstance(parent, (ast.For, ast.comprehension)) and parent.iter is expression

    def _called(self, node: ast.Call) -> Value:
        name = ast.unparse(node.func)
        if name in self._clocks:
            return Value(moment=_NOW)
        last = name.rpartition(".")[2]
        if last in _SECONDS:
            return Value(sign=1)
        if name in self._functions:
            ways = [
                self.value(one.value) for one in ast.walk(self._functions[name])
                if isinstance(one, ast.Return) and self._function_of(one) is self._functions[name]
            ]
            # A moment that it returns was read in the call.
            return next((one._replace(moment=_NOW) if one.moment else one for one in ways if one.is_time), NOTHING)
        if last in _COUNTS:
            return NOTHING
        found = [_first(*one.parts) if one.parts else one for one in map(self.value, node.args)]
        if name in _THROUGH:
            return _first(*found)
        # Seconds go through calls, as through a reduction over ranks; a moment may be anything's argument.
        return Value(sign=_first(*found).sign)


def is_bound_from_above(node: ast.Compare, scope: Scope) -> bool:
    """Whether a comparison holds only where not too much time has passed."""
    sides = [node.left, *node.comparators]
    for left, operation, right in zip(sides, node.ops, sides[1:], strict=False):
        one, other = scope.value(left), scope.value(right)
        if isinstance(operation, (ast.Gt, ast.GtE)):
            one, other = other, one
        elif isinstance(operation, ast.Eq):
            if one.sign or other.sign:
                return True
            continue
        elif not isinstance(operation, (ast.Lt, ast.LtE)):
            continue
        # Of two times, one is a bound of the other from above, whichever it is.
        if one.sign > 0 or other.sign < 0:
            return True
        # Two moments that were noted may stand in the order of what they note.
        if one.moment == _NOW != other.moment or (one.moment and other.is_limit and not one.is_limit):
            return True
    return False


def negated(node: ast.Compare) -> ast.Compare:
    """What a comparison of two values says where it does not hold."""
    other = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
    return ast.Compare(node.left, [other.get(type(one), type(one))() for one in node.ops], node.comparators)


def _combined(operation: ast.operator, left: Value, right: Value, right_node: ast.expr) -> Value:
    if isinstance(operation, ast.Sub):
        if left.moment and (right.moment or not isinstance(right_node, ast.Constant)) and not right.sign:
            return Value(sign=1 if left.moment >= right.moment else -1)
        if right.moment and not left.moment:
            return Value(sign=-1)
        return left if left.is_time else Value(sign=-right.sign)
    found = left if left.is_time else right
    return found._replace(is_limit=True) if found.moment and isinstance(operation, ast.Add) else found


def _first(*values: Value) -> Value:
    return next((one for one in values if one.is_time), NOTHING)

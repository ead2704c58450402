"""Nested structures."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest

from mpidist import tree


class Point(NamedTuple):
    x: Any
    y: Any


STRUCTURES = [1.0, None, [], (), {}, [1, [2, (3,)]], {"b": 1, "a": {"c": [2]}}, Point(1, Point(None, 2)), (1, None)]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_round_trip(structure: Any) -> None:
    leaves, spec = tree.flatten(structure)
    again = tree.unflatten(spec, leaves)
    assert again == structure
    assert type(again) is type(structure)


class Named(dict[str, Any]):
    """A subclass with an attribute."""

    label = "none"


class Sorted(OrderedDict[str, Any]):
    pass


def test_a_subclass_of_dict_comes_back_as_one() -> None:
    named = Named(b=1, a=[2, Sorted(z=3, y=4)])
    named.label = "mine"
    leaves, spec = tree.flatten(named)
    assert leaves == [2, 4, 3, 1]
    again = tree.unflatten(spec, [leaf * 10 for leaf in leaves])
    assert again == {"a": [20, {"y": 40, "z": 30}], "b": 10}
    assert (type(again), type(again["a"][1]), again.label) == (Named, Sorted, "mine")
    assert named == {"b": 1, "a": [2, {"z": 3, "y": 4}]}
    assert tree.map_leaves(lambda x, y: x + y, named, again) == {"a": [22, {"y": 44, "z": 33}], "b": 11}
    assert [path for path, _ in tree.leaf_paths(named)] == ["['a'][0]", "['a'][1]['y']", "['a'][1]['z']", "['b']"]
    counted = tree.map_leaves(lambda x: x + 1, Counter("aab"))
    assert (type(counted), counted) == (Counter, {"a": 3, "b": 2})
    by_default: Any = tree.map_leaves(lambda x: x + 1, defaultdict(list, a=1))
    assert by_default["missing"] == []
    mixed = Named({1: 1, "a": 2})  # type: ignore[dict-item]
    assert tree.map_leaves(lambda x: -x, mixed) == {1: -1, "a": -2}


def test_none_is_a_leaf() -> None:
    assert tree.flatten((1, None, [None]))[0] == [1, None, None]


def test_the_order_of_keys_does_not_matter() -> None:
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert tree.flatten(one)[0] == tree.flatten(other)[0] == [1, 2]
    assert list(tree.map_leaves(lambda x: x, other)) == ["b", "a"], "the caller's own order stays"


def test_map_over_several() -> None:
    assert tree.map_leaves(lambda a, b: a + b, {"x": (1, 2)}, {"x": (10, 20)}) == {"x": (11, 22)}
    with pytest.raises(ValueError, match=r"[Ee]xpected"):
        tree.map_leaves(lambda a, b: a + b, {"x": (1, 2)}, {"x": (10, 20, 30)})


def test_paths_name_each_leaf() -> None:
    paths = tree.leaf_paths({"layers": [1, {"bias": None}]})
    assert paths == [("['layers'][0]", 1), ("['layers'][1]['bias']", None)]
    assert tree.leaf_paths(5) == [("", 5)]

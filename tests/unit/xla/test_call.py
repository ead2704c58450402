"""Calls from XLA into Python: what they get, in which order, how they fail, and where they cannot go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is in the extra 'jax'")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

from mpidist import xla  # noqa: E402
from mpidist.errors import is_interrupt  # noqa: E402
from mpidist.xla import structs  # noqa: E402

_seen: list[tuple[float, str]] = []


def _note(inputs: list[Any], outputs: list[Any], place: str) -> None:
    assert inputs[0] is outputs[0]
    _seen.append((float(inputs[0].ravel()[0]), place))


_call = xla.Call("mpidist.test.note", _note, placed=True)


def note(x: Any) -> Any:
    return _call([x])[0]


def slow(x: Any) -> Any:
    return x * (jnp.ones((200, 200)) @ jnp.ones((200, 200)))[0, 0] / 200


def run(program: Any) -> list[float]:
    _seen.clear()
    jax.block_until_ready(jax.jit(program)(jnp.float32(1)))
    return [round(value) for value, _ in _seen]


def test_results_have_the_memory_of_their_operands() -> None:
    def double(inputs: list[Any], outputs: list[Any]) -> None:
        for output in outputs:
            np.multiply(output, 2, out=output)

    call = xla.Call("mpidist.test.double", double)
    given = [jnp.arange(3.0), jnp.ones((2, 0)), jnp.int8(4), jnp.ones(2, "bfloat16")]
    for made in (call(given), jax.jit(call)(given)):
        jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, 2 * other), made, given)
    # The operand itself is as before.
    assert given[0][1] == 1


def test_results_of_other_shapes() -> None:
    def twice(inputs: list[Any], outputs: list[Any]) -> None:
        np.concatenate([inputs[0]] * 2, out=outputs[0])

    call = xla.Call(
        "mpidist.test.twice", twice, shapes=lambda one: [jax.ShapeDtypeStruct((2 * one.shape[0],), one.dtype)]
    )
    np.testing.assert_array_equal(jax.jit(call)([jnp.arange(3)])[0], [0, 1, 2, 0, 1, 2])


def test_calls_that_do_not_depend_on_each_other_run_in_their_order() -> None:
    """XLA ran these as 1, 3, 5, 0, 2, 4."""
    assert run(lambda x: [note(slow(x * i) if i % 2 == 0 else x * i) for i in range(6)]) == [0, 1, 2, 3, 4, 5]


def test_the_order_goes_through_loops_branches_and_functions() -> None:
    inner = jax.jit(lambda x: note(slow(x)))
    # Also a function that JAX has recorded outside.
    inner(jnp.float32(0)).block_until_ready()

    def program(x: Any) -> Any:
        made = [note(slow(x * 1))]
        made += [lax.scan(lambda c, _: (note(slow(c) + 1), None), x, None, length=2)[0]]
        made += [inner(4 * x), inner(5 * x), jax.checkpoint(note)(6 * x)]
        made += [lax.while_loop(lambda c: note(c) < 8, lambda c: note(c + 0) + 1, 7 * x)]
        made += [lax.cond(x > 0, inner, lambda x: x, 9 * x), lax.switch(1, [note, note, note], 10 * x)]
        return [*made, lax.fori_loop(0, 2, lambda i, c: note(c + 1), 10 * x), note(13 * x)]

    assert run(program) == [1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11, 12, 13]
    # XLA may keep the order by chance. The numbers tell whether a call waits for those before it; in a loop all rounds
    # have the same.
    numbers = [int(place.split()[1]) for value, place in _seen if value in (1, 2, 4, 5, 6, 9, 10, 11, 13)]
    assert sorted(set(numbers)) == numbers


def test_places_have_numbers_and_lines() -> None:
    run(lambda x: note(x) + note(x + 1))
    (_, first), (_, second) = _seen
    assert first.startswith("call 0 at test_call.py:")
    assert second.startswith("call 1 at test_call.py:")
    assert first.endswith(" in note")


def test_the_interface_of_the_installed_jaxlib_is_known() -> None:
    """Where it is not, calls take twice as long and more, in silence."""
    assert xla.reason_for_callbacks() is None


def test_an_error_arrives_with_its_traceback() -> None:
    def fail(*_: Any) -> None:
        raise KeyError("no such thing")

    call = xla.Call("mpidist.test.fail", fail)
    raised = (jax.errors.JaxRuntimeError, ValueError)
    for program in (lambda x: call([x]), jax.jit(lambda x: call([slow(x)]))):
        with pytest.raises(raised, match=r"in fail\n(.*\n)*.*KeyError: 'no such thing'"):
            jax.block_until_ready(program(jnp.float32(1)))


def test_an_interrupt_in_a_call_is_known_by_the_error_that_jax_makes_of_it() -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    call = xla.Call("mpidist.test.interrupted", fail)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as info:
        jax.block_until_ready(call([jnp.float32(1)]))
    assert is_interrupt(info.value)
    assert is_interrupt(KeyboardInterrupt())
    assert not is_interrupt(ValueError("KeyboardInterrupt"))


def test_waiting_for_what_was_started() -> None:
    done: list[bool] = []

    def work(*_: Any) -> None:
        time.sleep(0.05)  # simulates work: long enough that a caller that does not wait is ahead
        done.append(True)
        xla.wait()

    call = xla.Call("mpidist.test.late", work)
    program = jax.jit(lambda x: call([slow(x)])[0])
    for count in range(1, 4):
        program(jnp.float32(1))
        xla.wait()
        assert len(done) == count


def test_recording_is_noticed() -> None:
    found: list[bool] = []

    def program(x: Any) -> Any:
        found.append(xla.is_recorded())
        return x

    program(1.0)
    jax.jit(program)(1.0)
    jax.vmap(program)(jnp.ones(2))
    lax.scan(lambda c, _: (program(c), None), 1.0, None, length=1)
    assert found == [False, True, False, True]


def test_the_header_of_another_version_is_refused() -> None:
    header = structs.read_header()
    assert structs.version_of(header)[0] == 0
    with pytest.raises(RuntimeError, match="expected a struct XLA_FFI_Buffer that begins with"):
        structs.version_of(header.replace("void* data;\n  int64_t rank;", "int64_t rank;\n  void* data;"))
    with pytest.raises(RuntimeError, match="expected XLA_FFI_ExecutionStage_EXECUTE = 3"):
        structs.version_of(header.replace("XLA_FFI_ExecutionStage_EXECUTE = 3", "XLA_FFI_ExecutionStage_EXECUTE = 4"))


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True,
        timeout=120,
    )
    return done.stdout


def test_calls_go_by_callbacks_where_the_self_test_fails() -> None:
    """Numbers of dtypes that another version of the interface might have."""
    out = python(
        """if True:
        import jax, jax.numpy as jnp, numpy as np
        from mpidist import xla
        from mpidist.xla import structs
        structs.DTYPES[11] = np.dtype(np.int32)
        seen = []
        def work(inputs, outputs, place):
            seen.append(int(inputs[0]))
            outputs[0] += 1
        call = xla.Call("c", work, placed=True)
        def program(x):
            first = call([x])[0]
            return jax.lax.scan(lambda c, _: (call([c])[0], None), first, None, length=2)[0], call([x + 9])[0]
        print(call.primitive, xla.reason_for_callbacks(), jax.jit(program)(1.0), seen)
        xla.wait()
        """
    )
    assert out.startswith("None RuntimeError: expected a call to get array(")
    assert out.endswith("[1, 2, 3, 10]\n")


def test_programs_that_cannot_be_are_refused() -> None:
    """Of several devices; and where nobody has connected the calls."""
    out = python(
        """if True:
        import jax, jax.numpy as jnp
        from jax.sharding import Mesh, PartitionSpec
        from mpidist import xla
        call = xla.Call("c", lambda inputs, outputs: None)
        mesh = Mesh(jax.devices(), "d")
        program = jax.shard_map(lambda x: call([x])[0], mesh=mesh, in_specs=PartitionSpec("d"),
                                out_specs=PartitionSpec("d"), check_vma=False)
        try:
            jax.jit(program)(jnp.ones(2))
        except ValueError as error:
            print(error)
        jax.monitoring.clear_event_listeners()
        try:
            jax.block_until_ready(jax.jit(lambda x: call([x])[0])(1.0))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            print(error)
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert "expected a program of one device, since a rank is one replica, got mhlo.num_partitions = 2" in out
    assert "`jax.monitoring.clear_event_listeners()` was called. Call it before" in out

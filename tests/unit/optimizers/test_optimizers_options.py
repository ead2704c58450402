"""Optimizers on one rank: the options of all families, clipping and loss scaling by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist import optimizers
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import SGD, Adadelta, Adagrad, Ftrl, Lion, LossScaleOptimizer, RMSprop
from tests.optimizers import FAMILIES, Family


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SGD(weight_decay=-1), "`weight_decay` must not be negative, got -1"),
        (lambda: SGD(momentum=2), "`momentum` must be between 0 and 1, got 2"),
        (lambda: SGD(float("nan")), "`learning_rate` must not be negative, and must be finite, got nan"),
        (lambda: RMSprop(momentum=1.5), "`momentum` must be between 0 and 1, got 1.5"),
        (lambda: optimizers.LARS(momentum=2), "`momentum` must be between 0 and 1, got 2"),
        (lambda: SGD(clipnorm=0), "`clipnorm` must be above 0, got 0"),
        (lambda: SGD(clipvalue=float("nan")), "`clipvalue` must be above 0"),
        (lambda: SGD(clipvalue=1.0, global_clipnorm=1.0), "at most one of clipvalue, clipnorm and global_clipnorm"),
        (lambda: SGD(gradient_accumulation_steps=1), "`gradient_accumulation_steps` must be an integer of at least 2"),
        (lambda: SGD(ema_momentum=1.5), "`ema_momentum` must be between 0 and 1, got 1.5"),
        (lambda: SGD(use_ema=True, ema_overwrite_frequency=0), "`ema_overwrite_frequency` must be an integer"),
        (lambda: SGD(ema_overwrite_frequency=3), "needs `use_ema=True`"),
        (lambda: RMSprop(rho=1.0), "`rho` must be below 1"),
        (lambda: RMSprop(momentum=-1), "`momentum`"),
        (lambda: Adagrad(initial_accumulator_value=-0.1), "`initial_accumulator_value`"),
        (lambda: Adagrad(initial_accumulator_value=0, epsilon=0), "must not both be 0"),
        (lambda: Adadelta(epsilon=0), "`epsilon` must be above 0"),
        (lambda: Ftrl(learning_rate_power=0.5), "`learning_rate_power` must not be above 0"),
        (lambda: Ftrl(l1_regularization_strength=-1), "`l1_regularization_strength`"),
        (lambda: Lion(beta_2=1), "`beta_2` must be below 1"),
        (lambda: optimizers.LAMB(beta_1=1), "`beta_1` must be below 1"),
        (lambda: optimizers.LARS(eeta=-1), "`eeta`"),
        (lambda: optimizers.LARS(momentum=0, nesterov=True), "needs a `momentum`"),
        (lambda: LossScaleOptimizer(SGD(), 0), "`initial_scale` must be above 0"),
        (lambda: LossScaleOptimizer(SGD(), float("inf")), "`initial_scale`"),
        (lambda: LossScaleOptimizer(SGD(), 8, 0), "`dynamic_growth_steps` must be an integer"),
    ],
)
def test_options_out_of_range(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize(
    "make",
    [
        lambda of: SGD(of(0.5), of(0.75), weight_decay=of(0.25)),
        lambda of: SGD(0.5, use_ema=True, ema_momentum=of(0.75), ema_overwrite_frequency=2),
        lambda of: optimizers.Adam(0.5, of(0.75), of(0.875), of(0.125)),
        lambda of: RMSprop(0.5, of(0.75), of(0.5), of(0.125)),
        lambda of: SGD(optimizers.CosineDecay(of(0.5), of(7), of(0.125))),
        lambda of: SGD(optimizers.PolynomialDecay(of(0.5), of(7), of(0.125), of(3))),
        lambda of: SGD(optimizers.CosineDecayRestarts(of(0.5), of(7), of(1.5), of(0.75), of(0.125))),
        lambda of: SGD(optimizers.InverseTimeDecay(of(0.5), of(7), of(3))),
        lambda of: SGD(optimizers.ExponentialDecay(of(0.5), of(7), of(0.75))),
        lambda of: SGD(optimizers.LinearWarmup(3, of(0.5))),
        lambda of: SGD(optimizers.PiecewiseConstantDecay((2,), (of(0.5), of(0.75)))),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers_of_numpy_give_the_bits_of_pythons(make: Any, kind: Any, dtype: str) -> None:
    rng = np.random.default_rng(0)
    first, gradients = rng.normal(size=50).astype(dtype), rng.normal(size=(4, 50)).astype(dtype)
    results = []
    for of in (kind, float):
        variable, optimizer = mpidist.Variable(first), make(of)
        for gradient in gradients:
            optimizer.apply_gradients([(gradient.copy(), variable)])
        results.append(variable.numpy())
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize(
    ("rate", "kind", "text"),
    [
        (np.array([0.5]), TypeError, r"SGD: the learning rate must be a number, got an array of shape \(1,\)"),
        (None, TypeError, "SGD: the learning rate must be a number, got None"),
        (-0.5, ValueError, "SGD: expected a learning rate, got -0.5 from -0.5 at step 0: it must not be negative"),
        (lambda _: -0.5, ValueError, "it must not be negative"),
        (lambda _: None, TypeError, "the learning rate must be a number, got None of type NoneType from its schedule"),
    ],
)
def test_a_rate_that_is_set_or_scheduled_is_checked(rate: Any, kind: type[Exception], text: str) -> None:
    variable, optimizer = mpidist.Variable([1.0]), SGD(0.5)
    optimizer.learning_rate = rate
    with pytest.raises(kind, match=text):
        optimizer.apply_gradients([(np.ones(1, "f"), variable)])
    assert variable.numpy().tolist() == [1.0]
    optimizer.learning_rate = np.float32(0.5)
    optimizer.apply_gradients([(np.ones(1, "f"), variable)])
    assert variable.numpy().tolist() == [0.5]


def test_the_rate_of_a_scaled_loss_is_that_of_the_optimizer_inside() -> None:
    variable, scaled = mpidist.Variable([1.0]), LossScaleOptimizer(SGD(0.5), 4.0)
    assert scaled.learning_rate == 0.5
    scaled.learning_rate = 0.25
    scaled.apply_gradients([(np.full(1, 4, "f"), variable)])
    assert variable.numpy().tolist() == [0.75]
    wrong: Any
    for wrong in ("a", None, [object()]):
        with pytest.raises(TypeError, match="LossScaleOptimizer: `loss` must be a number or an array of numbers, got"):
            scaled.scale_loss(wrong)


def test_integers_of_numpy_are_options() -> None:
    optimizer = SGD(
        gradient_accumulation_steps=np.int64(2), use_ema=np.True_, ema_overwrite_frequency=np.int64(3),  # type: ignore[arg-type]
    )
    assert type(optimizer.options.gradient_accumulation_steps) is int
    for wrong in (True, 2.0, "2"):
        with pytest.raises(TypeError, match="`gradient_accumulation_steps` must be an integer of at least 2, got"):
            SGD(gradient_accumulation_steps=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`clipnorm` must be a number or None, got True"):
        SGD(clipnorm=True)


def test_what_is_no_option() -> None:
    for name, way_out in (
        ("clip_norm", "Use clipnorm"), ("lr", "Use learning_rate"), ("betas", "Use beta_1 and beta_2"),
        ("use_emma", "Use use_ema"), ("nonsense", "Every optimizer takes weight_decay, clipvalue"),
    ):
        with pytest.raises(TypeError, match=f"SGD has no argument '{name}'. {way_out}"):
            SGD(0.1, **{name: 1.0})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be an optimizer of mpidist"):
        LossScaleOptimizer(LossScaleOptimizer(SGD()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"momentum": "a"}, {"weight_decay": "a"}, {"clipnorm": "a"}, {"ema_momentum": "a"}, {"weight_decay": [1]}],
)
def test_what_is_no_number(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"`{next(iter(options))}` must be a number.*, got"):
        SGD(0.1, **options)


@pytest.mark.parametrize("is_built", [False, True])
def test_a_list_that_was_forgotten(is_built: bool) -> None:
    w, optimizer = mpidist.Variable([1.0, 2.0], name="w"), SGD(0.1)
    gradient = np.ones(2, np.float32)
    if is_built:
        optimizer.build([w])
    calls: list[Any] = [optimizer.gradients, optimizer.build, optimizer.finalize_variable_values]
    for call in calls:
        with pytest.raises(TypeError, match=r"SGD expected a list of variables, got only .*'w'.*Pass a list"):
            call(w)
        with pytest.raises(TypeError, match="SGD expected a list of variables, got 3 of type int"):
            call(3)
    for wrong in (gradient, (gradient, w), [(w, gradient)], [(gradient, w, 1)], [(gradient, 5)]):
        with pytest.raises(TypeError, match=r"SGD expected pairs \(gradient, variable\), got an element .*zip"):
            optimizer.apply_gradients(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"SGD expected a list of pairs \(gradient, variable\), got 3"):
        optimizer.apply_gradients(3)  # type: ignore[arg-type]
    assert optimizer.iterations == 0
    optimizer.apply_gradients([gradient, w] for _ in range(1))  # type: ignore[misc]  # a list is a pair, too


@pytest.mark.parametrize(("scale", "text"), [("x", "must be a number, got 'x'"), (0, "must not be 0")])
def test_a_loss_scale_is_a_number_above_zero(scale: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"`scale` {text}"):
        SGD(0.1).apply_scaled_gradients([(np.ones(()), mpidist.Variable(1.0))], scale)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tf_keras_names_and_defaults(family: Family) -> None:
    optimizer = getattr(optimizers, family.name)()
    assert (optimizer.learning_rate, *vars(optimizer.kernel).values()) == family.defaults
    assert optimizer.name == family.name


def test_names_and_defaults_of_a_loss_scale() -> None:
    scaled = LossScaleOptimizer(SGD())
    assert (scaled.dynamic_scale, scaled.dynamic_growth_steps) == (32768, 2000)
    assert repr(scaled) == "<LossScaleOptimizer dynamic_scale=32768 of <SGD iterations=0 variables=not built>>"


def test_ftrl_needs_a_rate() -> None:
    variable = mpidist.Variable([1.0])
    with pytest.raises(ValueError, match=r"Ftrl needs a learning rate above 0, got 0\.0"):
        Ftrl(0.0).apply_gradients([([1.0], variable)])


def test_ftrl_without_an_initial_accumulator_divides_nothing_by_zero() -> None:
    variable = mpidist.Variable(np.zeros(3))
    Ftrl(0.1, initial_accumulator_value=0.0).apply_gradients([(np.array([0.0, 1.0, -1.0]), variable)])
    np.testing.assert_allclose(variable.numpy(), [0, -0.1, 0.1])


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), st.floats(0.01, 1e3))
def test_a_clipped_gradient_points_the_same_way_and_is_short_enough(values: list[float], limit: float) -> None:
    gradient = np.array(values)
    norm = float(np.sqrt(np.sum(gradient**2)))
    for options in ({"clipnorm": limit}, {"global_clipnorm": limit}):
        variable = mpidist.Variable(np.zeros(len(values)))
        SGD(1.0, **options).apply_gradients([(gradient, variable)])  # type: ignore[arg-type]
        np.testing.assert_allclose(-variable.numpy(), gradient * min(1.0, limit / max(norm, limit)), atol=1e-9)


def test_weight_decay_leaves_variables_without_gradient() -> None:
    first, second = mpidist.Variable([2.0]), mpidist.Variable([2.0])
    optimizer = SGD(0.5, weight_decay=0.5)
    optimizer.apply_gradients([([0.0], first), (None, second)])
    assert first.numpy() == 1.5
    assert second.numpy() == 2.0


def test_the_scale_of_a_loss() -> None:
    optimizer = LossScaleOptimizer(SGD(1.0), 2.0**17)
    assert optimizer.scale_loss(np.float32(2)).dtype == np.float32
    assert optimizer.scale_loss(np.float32(2)) == 2.0**18
    # Too much for float16: two steps are skipped, and then it fits.
    variable = mpidist.Variable(0.0)
    for _ in range(3):
        optimizer.apply_gradients([(optimizer.scale_loss(np.float16(1)), variable)])
    assert variable.numpy() == -1
    assert optimizer.dynamic_scale == 2.0**15
    assert optimizer.iterations == 1


def test_the_scale_stays_within_bounds() -> None:
    variable = mpidist.Variable(0.0)
    small, large = LossScaleOptimizer(SGD(1.0), 2.0), LossScaleOptimizer(SGD(1.0), 2.0**125, 1)
    for _ in range(3):
        small.apply_gradients([(np.nan, variable)])
        large.apply_gradients([(0.0, variable)])
    assert small.dynamic_scale == 1
    assert large.dynamic_scale == 2.0**126
    assert variable.numpy() == 0


def test_rows_given_twice_count_twice() -> None:
    table = mpidist.Variable(np.zeros((4, 2)))
    rows = IndexedSlices(np.array([[1.0, 2.0], [10.0, 20.0], [5.0, 5.0]]), np.array([2, 2, 0]))
    SGD(1.0).apply_gradients([(rows, table)])
    np.testing.assert_array_equal(table.numpy(), [[-5, -5], [0, 0], [-11, -22], [0, 0]])
    assert rows.values[0, 0] == 1, "what the caller passes is not changed"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_in_half_precision_are_added_in_float32(dtype: str) -> None:
    ones = IndexedSlices(np.ones((4000, 2), named_dtype(dtype)), np.zeros(4000, np.int64))
    for sparse_gradient in (False, True):
        variable = mpidist.Variable(np.zeros((3, 2), named_dtype(dtype)), sparse_gradient=sparse_gradient)
        SGD(1.0).apply_gradients([(ones, variable)])
        assert variable.numpy().tolist() == [[-4000, -4000], [0, 0], [0, 0]]


@pytest.mark.parametrize("shape", [(3,), (3, 0), (3, 2, 2)])
def test_rows_of_any_shape_make_a_dense_gradient(shape: tuple[int, ...]) -> None:
    for indices in ([], [2, 0, 2]):
        rows = IndexedSlices(np.ones((len(indices), *shape[1:]), np.float32), np.array(indices, np.int64))
        variable = mpidist.Variable(np.zeros(shape, np.float32))
        SGD(1.0).apply_gradients([(rows, variable)])
        expected = np.zeros(shape, np.float32)
        np.subtract.at(expected, rows.indices, rows.values)
        assert variable.numpy().tolist() == expected.tolist()


def test_a_call_that_fails_accumulates_nothing() -> None:
    good, bad = mpidist.Variable(np.zeros(2)), mpidist.Variable(np.zeros(2))
    optimizer = SGD(1.0, gradient_accumulation_steps=2)
    gradient = np.ones(2)
    optimizer.apply_gradients([(gradient, good), (gradient, bad)])
    with pytest.raises(ValueError, match=r"expected a value of shape \(2,\), got \(3,\)"):
        optimizer.apply_gradients([(gradient, good), (np.ones(3), bad)])
    optimizer.apply_gradients([(gradient, good), (gradient, bad)])
    assert (good.numpy().tolist(), bad.numpy().tolist()) == ([-1, -1], [-1, -1])


@pytest.mark.parametrize("make", [SGD, Lion])
def test_a_variable_without_gradients_in_a_later_update_stays_as_it_is(make: Any) -> None:
    """Momentum would move it with a gradient of zero, too."""
    first, second = mpidist.Variable([1.0]), mpidist.Variable([1.0])
    optimizer = make(0.5, gradient_accumulation_steps=2, **({"momentum": 0.5} if make is SGD else {}))
    optimizer.build([first, second])
    gradient = np.ones(1, "f")
    for _ in range(2):
        optimizer.apply_gradients([(gradient, first), (gradient, second)])
    before = second.numpy().tolist()
    assert before != [1.0]
    for _ in range(2):
        optimizer.apply_gradients([(gradient, first), (None, second)])
    assert second.numpy().tolist() == before
    optimizer.apply_gradients([(None, first), (gradient, second)])
    optimizer.apply_gradients([(gradient, first), (None, second)])
    assert second.numpy().tolist() != before, "it has a gradient in one of the two calls"


def test_a_schedule_that_fails_leaves_what_was_accumulated() -> None:
    rates = iter([None, 1.0])
    variable = mpidist.Variable(np.zeros(2))
    optimizer = SGD(lambda _: next(rates), gradient_accumulation_steps=2)  # type: ignore[arg-type,return-value]
    optimizer.apply_gradients([(np.ones(2), variable)])
    with pytest.raises(TypeError, match="NoneType"):
        optimizer.apply_gradients([(np.full(2, 3.0), variable)])
    optimizer.apply_gradients([(np.full(2, 3.0), variable)])
    assert variable.numpy().tolist() == [-2, -2]


def test_the_scale_doubles_after_steps_in_a_row_and_is_halved_by_one_that_is_skipped() -> None:
    variable = mpidist.Variable(np.zeros(2))
    optimizer = LossScaleOptimizer(SGD(1.0), 8.0, 3)
    scales = []
    for gradient in (1.0, 1.0, np.inf, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        optimizer.apply_gradients([(np.full(2, gradient), variable)])
        scales.append(optimizer.dynamic_scale)
    assert scales == [8, 8, 4, 4, 4, 8, 8, 8, 16]


@pytest.mark.parametrize(
    "family", [family.name for family in FAMILIES]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"clipvalue": 0.3}, {"clipnorm": 0.3}, {"global_clipnorm": 0.3}, {"weight_decay": 0.05}, {"use_ema": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_complex_numbers_are_updated_by_their_parts(family: str, options: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    begin = random.standard_normal((3, 4))
    whole = mpidist.Variable(begin.view("complex128"))
    parts, other = mpidist.Variable(begin), mpidist.Variable(np.ones(2))
    make = getattr(mpidist.optimizers, family)
    of_whole, of_parts = make(learning_rate=0.1, **options), make(learning_rate=0.1, **options)
    of_whole.build([whole, other])
    of_parts.build([parts, mpidist.Variable(np.ones(2))])
    for _ in range(4):
        gradient = random.standard_normal((3, 4))
        of_whole.apply_gradients([(gradient.view("complex128"), whole)])
        of_parts.apply_gradients([(gradient, parts)])
    assert np.allclose(whole.numpy().view("float64"), parts.numpy(), rtol=1e-12, atol=0)
    if options.get("use_ema"):
        of_whole.finalize_variable_values([whole])
        of_parts.finalize_variable_values([parts])
        assert np.allclose(whole.numpy().view("float64"), parts.numpy(), rtol=1e-12, atol=0)

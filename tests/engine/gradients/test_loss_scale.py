"""The arithmetic of a loss scale, against a plain reference; what its options refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sherd import ConfigError, LossScale
from sherd.engine.gradients.loss_scale import Change, DynamicScale

pytestmark = pytest.mark.pure

options = st.builds(
    lambda floor, above, more, **others: LossScale(
        floor=2.0**floor, initial=2.0 ** (floor + above), ceiling=2.0 ** (floor + above + more), **others
    ),
    floor=st.integers(-4, 4),
    above=st.integers(0, 8),
    more=st.integers(0, 4),
    growth_interval=st.integers(1, 5),
    growth=st.sampled_from([1.0, 2.0, 4.0]),
    backoff=st.sampled_from([0.25, 0.5]),
    hysteresis=st.integers(1, 3),
)


def reference(options, steps):
    """The scale after each step, and the step that fails, found by looking back at all steps each time."""
    scales, since, scale = [], 0, options.initial
    for number in range(len(steps)):
        recent = steps[since : number + 1]
        in_a_row = recent[::-1].index(False) if False in recent else len(recent)
        overflows = recent.count(False)
        if steps[number] and in_a_row == options.growth_interval:
            scale, since = min(scale * options.growth, options.ceiling), number + 1
        elif not steps[number] and overflows == options.hysteresis:
            if scale == options.floor:
                return scales, number
            scale, since = max(scale * options.backoff, options.floor), number + 1
        scales.append(scale)
    return scales, None


@given(options, st.lists(st.booleans(), max_size=60))
def test_a_scale_follows_its_steps(options, steps):
    expected, fails_at = reference(options, steps)
    scale, found = DynamicScale(options), []
    for number, finite in enumerate(steps):
        before = scale.value
        change = scale.step(finite)
        if number == fails_at:
            assert change is Change.EXHAUSTED and scale.value == before == options.floor
            return
        assert (
            change
            is {True: Change.GROWN, False: Change.REDUCED, None: Change.NONE}[
                None if scale.value == before else scale.value > before
            ]
        )
        found.append(scale.value)
    assert found == expected and fails_at is None


@given(options, st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_a_state_that_is_taken_over_goes_on_alike(options, before, after):
    one, other = DynamicScale(options), DynamicScale(options)
    for finite in before:
        one.step(finite)
    other.state = one.state
    assert [(one.step(each), one.state) for each in after] == [(other.step(each), other.state) for each in after]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"initial": 1000}, r"initial=1000.0 must be a power of two.*; write initial=1024"),
        ({"initial": -2.0}, "initial=-2.0 must be a power of two"),
        ({"growth": 0.5}, "growth=0.5 must be at least 1"),
        ({"backoff": 1.0}, "backoff=1.0 must be below 1"),
        ({"growth_interval": 0}, "growth_interval=0 must be at least 1"),
        ({"hysteresis": 0}, "hysteresis=0 must be at least 1"),
        ({"floor": 2.0**17}, "initial=65536.0 must be between floor=131072 and ceiling="),
        ({"ceiling": 4.0}, "initial=65536.0 must be between floor=1 and ceiling=4"),
        ({"interval": 3}, "LossScale has no option 'interval'; did you mean"),
    ],
)
def test_what_cannot_work_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        LossScale(**wrong)

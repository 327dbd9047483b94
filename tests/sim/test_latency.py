import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.latency import Latency


def test_measured_points_are_met_and_joined_by_lines():
    latency = Latency.of({4: 40.0, 1: 10.0, 2: 12.0})
    assert [latency(n) for n in (1, 1.5, 2, 3, 4)] == [10, 11, 12, 26, 40]


def test_the_outer_lines_go_on():
    latency = Latency.of({2: 10.0, 4: 14.0, 8: 20.0})
    assert (latency(1), latency(12)) == (8, 26)


def test_extrapolation_neither_falls_with_size_nor_below_zero():
    falling = Latency.of({1: 5.0, 2: 4.0, 4: 3.0})
    assert (falling(0), falling(100)) == (5, 3)
    steep = Latency.of({2: 1.0, 3: 11.0})
    assert steep(1) == 0


@given(st.floats(0, 100), st.floats(0, 100))
def test_one_point_is_a_constant(size, seconds):
    assert Latency.constant(seconds)(size) == seconds


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [((), (), "at least 1"), ((1.0, 2.0), (1.0,), "of one length"), ((2.0, 1.0), (1.0, 2.0), "must rise"), ((1.0,), (-1.0,), "seconds=")],
)
def test_bad_points_are_refused(sizes, seconds, message):
    with pytest.raises(ValueError, match=message):
        Latency(sizes, seconds)


def test_no_points_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Latency.of({})

"""UserError carries a problem and a fix, whatever else it is."""

import pickle

import pytest

from coordexp.errors import DataError, EngineError, UserError, explain
from coordexp.files import WriteError


def test_the_text_of_an_error_is_the_problem_and_below_it_the_fix():
    assert str(UserError("a.png is missing", "copy it")) == "a.png is missing\n  copy it"
    assert str(UserError("a.png is missing")) == "a.png is missing"


def test_an_error_that_is_an_os_error_too_does_not_take_the_problem_for_a_number():
    error = WriteError("the disk is full", "make room")
    assert (error.problem, error.fix) == ("the disk is full", "make room")
    assert error.strerror is None


@pytest.mark.parametrize("kind", [UserError, DataError, EngineError])
def test_an_error_survives_a_process_border(kind):
    error = pickle.loads(pickle.dumps(kind("problem", "fix")))
    assert (type(error), error.problem, error.fix) == (kind, "problem", "fix")


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (ValueError("not a number"), "not a number"),
        (KeyError("place"), "KeyError('place')"),
        (FileNotFoundError(2, "No such file or directory", "a.json"), "No such file or directory"),
        (RecursionError(), "RecursionError"),
    ],
)
def test_an_exception_of_a_library_is_explained(raised, says):
    with pytest.raises(EngineError) as caught, explain(type(raised), "a.json", "copy it", to=EngineError):
        raise raised
    assert (caught.value.problem, caught.value.fix) == (f"a.json: {says}", "copy it")
    assert caught.value.__cause__ is raised


def test_other_exceptions_pass():
    with pytest.raises(TypeError), explain(ValueError, "a.json"):
        raise TypeError

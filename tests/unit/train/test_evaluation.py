"""How evaluation asks for answers. The backend is a fake that remembers what it was asked."""

import pytest

from coordexp.config.rollout import Decoding, RepeatTerminate, RolloutMatching
from coordexp.data import TrueObject
from coordexp.rollout.backend import Decode
from coordexp.train.evaluation import AnswerEvaluation
from tests.scripted import Said, ScriptedBackend, casebook
from tests.unit.core.conftest import box
from tests.vocabularies import table

SMALL = table("small")
GUARD = RepeatTerminate(enabled=True, min_new_tokens=5, max_object_keys=9)


@pytest.mark.scenario("R34.C1", on="fake")
@pytest.mark.parametrize("guard", [GUARD, RepeatTerminate(), GUARD.model_copy(update={"enabled": False})])
def test_evaluation_decodes_greedily_with_the_limit_and_the_guard_of_the_settings(tmp_path, guard):
    cases = casebook(tmp_path, {"a.png": (TrueObject("cup", box(1, 1, 9, 9)),)}, SMALL)
    backend = ScriptedBackend({"a.png": Said("{}", "repeat")}, SMALL)
    cfg = RolloutMatching(max_new_tokens=77, decoding=Decoding(temperature=0.7), repeat_terminate=guard)
    AnswerEvaluation(cases.records, backend, lambda: iter(()), SMALL, cfg, tmp_path)(step=4)
    ((request,),) = backend.calls
    assert request.decode == Decode(77, "greedy", guard=guard)
    assert backend.synced[0][1] == 4

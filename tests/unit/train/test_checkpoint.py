import json

from coordexp.train.checkpoints import newest_intact


def test_a_checkpoint_that_one_of_its_ranks_did_not_finish_is_passed_over(tmp_path):
    for step, finished in ((4, (0, 1)), (8, (0, 1)), (12, (0,)), (16, ())):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json"):
            (folder / name).touch()
        for rank in finished:
            (folder / f"stream_{rank}.json").write_text(json.dumps({"order": {"ranks": 2}}))
    assert newest_intact(tmp_path, print) == tmp_path / "checkpoint-8"

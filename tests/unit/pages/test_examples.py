"""The choice of the dumped examples that a page shows."""

import json

from coordexp.pages.rollouts import choose_examples


def dump(run, step, records=(0, 1), folder="dumps"):
    file = run / folder / f"step-{step:06d}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"format": 1, "place": {"step": step, "micro": 0, "record": record}} for record in records]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def steps(examples):
    return [example.content["place"]["step"] for example in examples]


def test_steps_of_a_long_run_are_chosen_evenly_and_include_the_first_and_the_last(tmp_path):
    for step in range(1000):
        dump(tmp_path, step)
    chosen, total = choose_examples(tmp_path, 20)
    assert sorted(set(steps(chosen))) == [0, 111, 222, 333, 444, 555, 666, 777, 888, 999]
    assert len(chosen) == 20
    assert total == 2000


def test_an_example_has_its_trace(tmp_path):
    dump(tmp_path, 3)
    lines = [{"format": 1, "example": 1, "loss": loss} for loss in (1.0,)]
    (tmp_path / "dumps/trained-000003.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen, _ = choose_examples(tmp_path, 9)
    assert [example.trained and example.trained["loss"] for example in chosen] == [None, 1.0]


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    file = dump(tmp_path, 3)
    file.write_text(file.read_text() + '{"format": 1, "pla')
    assert len(choose_examples(tmp_path, 9)[0]) == 2

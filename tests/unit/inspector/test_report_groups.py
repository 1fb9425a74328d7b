"""Which runs are seeds of one another, and what is different between those that are not."""

import pytest

from coordexp.errors import DataError
from coordexp.inspector.report.groups import differences, flat, grouped, without_secrets
from tests.unit.inspector.run_folders import logged, manifest, settings


def run(name, data=None, **training):
    tree = settings(**{"output_dir": f"runs/{name}"} | training)
    return logged(tree=tree, folder=f"runs/{name}", beginnings=[manifest(data=data or {})])


def test_runs_that_differ_in_seeds_and_names_alone_are_one_group():
    runs = [run("x-1", seed=1), run("x-2", seed=2, data_seed=5, run_name="again")]
    (group,) = grouped(runs)
    assert (group.letter, group.name, group.seeds) == ("A", "x", "1, 2")


def test_another_setting_makes_another_group_in_the_order_given():
    groups = grouped([run("b", learning_rate=2), run("a", learning_rate=1), run("c", learning_rate=2, seed=9)])
    assert [[one.run.name for one in group.runs] for group in groups] == [["b", "c"], ["a"]]


def test_a_copy_of_a_run_is_no_other_seed():
    with pytest.raises(DataError, match=r"the same settings, data and seed \(1\)\n  they count as one run"):
        grouped([run("a-1", seed=1), run("a-2", seed=2), run("copy", seed=1)])


def test_data_that_changed_under_the_same_settings_makes_another_group():
    runs = [run(name, data={"val": {"sha256": digest}}) for name, digest in (("x-1", "aa"), ("x-2", "bb"))]
    assert len(grouped(runs)) == 2


def test_a_run_counts_once():
    with pytest.raises(DataError, match=r"given twice\n  a run counts once"):
        grouped([run("x-1"), run("x-1")])


def test_nine_groups_are_too_many():
    with pytest.raises(DataError, match=r"9 groups .*\n  a page compares up to 8"):
        grouped([run(f"x-{k}", learning_rate=k) for k in range(9)])


def test_groups_of_the_same_name_are_told_apart():
    groups = grouped([logged(tree=settings(a=k), folder=f"{k}/run") for k in range(2)])
    assert [group.name for group in groups] == ["run", "run (2)"]


def test_names_without_anything_in_common_are_counted():
    (group,) = grouped([run("first", seed=1), run("other", seed=2)])
    assert group.name == "first and 1 more"


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (("classes-0", "classes-1"), "classes"),
        (("boss_1", "boss_2"), "boss"),
        (("boss1", "boss2"), "boss"),
        (("x-seed1", "x-seed2"), "x"),
        (("x-10", "x-11"), "x"),
        (("x-seed10", "x-seed11"), "x"),
        (("stage2a", "stage2b"), "stage2"),
        (("x_s-1", "x_s-2"), "x"),
        (("x.seed_1", "x.seed_2"), "x"),
        (("seed-1", "seed-2"), "seed-1 and 1 more"),
    ],
)
def test_a_group_is_called_what_its_runs_share_without_the_word_for_a_seed(names, shared):
    (group,) = grouped([run(name, seed=seed) for seed, name in enumerate(names)])
    assert group.name == shared


def test_differences_name_members_of_lists_and_leave_out_seeds():
    trees = [
        settings(seed=seed) | {"pipeline": {"objective": [{"name": "token_ce", "config": {"desc": weight}}]}}
        for seed, weight in ((1, 1.0), (2, 0.0))
    ]
    groups = grouped([logged(tree=tree, folder=f"runs/{k}") for k, tree in enumerate(trees)])
    assert differences(groups) == {"pipeline.objective[token_ce].config.desc": (1.0, 0.0)}


def test_a_setting_that_one_group_lacks_is_a_difference():
    groups = grouped([run("a"), run("b", extra=1)])
    assert differences(groups) == {"training.extra": (None, 1)}


def test_secrets_are_shown_nowhere():
    tree = {"hub_token": "abc", "nested": [{"password": "abc"}], "max_new_tokens": 5, "eos_token": None}
    assert "abc" not in repr(without_secrets(tree)) + repr(flat(tree))
    assert without_secrets(tree)["max_new_tokens"] == 5

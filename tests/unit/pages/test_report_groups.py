"""Which runs form a group, and what differs between groups."""

import pytest

from coordexp.errors import DataError
from coordexp.pages.run_folder import find_differences, flatten_settings, group_runs
from tests.unit.pages.run_folders import make_run, manifest, settings


def named_run(name, data=None, **training):
    tree = settings(**{"output_dir": f"runs/{name}"} | training)
    return make_run(tree=tree, folder=f"runs/{name}", starts=[manifest(data=data or {})])


def test_runs_that_differ_only_in_seeds_and_names_are_one_group():
    runs = [named_run("x-1", seed=1), named_run("x-2", seed=2, data_seed=5, run_name="again")]
    (group,) = group_runs(runs)
    assert (group.letter, group.name, group.seeds) == ("A", "x", "1, 2")


def test_another_setting_makes_another_group_in_the_order_given():
    groups = group_runs(
        [named_run("b", learning_rate=2), named_run("a", learning_rate=1), named_run("c", learning_rate=2, seed=9)]
    )
    assert [[run.name for run in group.runs] for group in groups] == [["b", "c"], ["a"]]


def test_a_copy_of_a_run_is_not_another_seed():
    with pytest.raises(DataError, match=r"the same settings, data and seed \(1\)\n  a run counts once"):
        group_runs([named_run("a-1", seed=1), named_run("a-2", seed=2), named_run("copy", seed=1)])


def test_data_that_changed_under_the_same_settings_makes_another_group():
    runs = [
        named_run(name, data={"val": {"file": "val.jsonl", "records": 1, "sha256": digest}})
        for name, digest in (("x-1", "aa"), ("x-2", "bb"))
    ]
    assert len(group_runs(runs)) == 2


def test_nine_groups_are_too_many():
    with pytest.raises(DataError, match=r"9 groups .*\n  a page compares up to 8"):
        group_runs([named_run(f"x-{k}", learning_rate=k) for k in range(9)])


def test_groups_with_the_same_name_are_numbered():
    groups = group_runs([make_run(tree=settings(a=k), folder=f"{k}/run") for k in range(2)])
    assert [group.name for group in groups] == ["run", "run (2)"]


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
        (("first", "other"), "first and 1 more"),
    ],
)
def test_a_group_is_named_by_the_shared_start_of_its_runs_without_the_seed(names, shared):
    (group,) = group_runs([named_run(name, seed=seed) for seed, name in enumerate(names)])
    assert group.name == shared


def test_differences_name_members_of_lists_and_leave_out_seeds():
    trees = [
        settings(seed=seed) | {"pipeline": {"objective": [{"name": "token_ce", "config": {"desc": weight}}]}}
        for seed, weight in ((1, 1.0), (2, 0.0))
    ]
    groups = group_runs([make_run(tree=tree, folder=f"runs/{k}") for k, tree in enumerate(trees)])
    assert find_differences(groups) == {"pipeline.objective[token_ce].config.desc": (1.0, 0.0)}


def test_secrets_are_never_shown():
    tree = {"hub_token": "abc", "nested": [{"password": "abc"}], "max_new_tokens": 5, "eos_token": None}
    assert "abc" not in repr(flatten_settings(tree)) and flatten_settings(tree)["max_new_tokens"] == 5

"""Plans: the commands and devices that follow from settings and lists of GPUs."""

import sys
from pathlib import Path

import pytest

from coordexp.config import ConfigError, World, parse_settings
from coordexp.config.yaml_tree import read_document
from coordexp.launch.plan import LaunchOptions, is_loopback, make_plan

CONFIG = "configs/stage2-server-3v1.yaml"


def settings(learners=1, **vllm):
    """Return the settings of the shipped config, with other keys under rollout_matching.vllm."""
    document = read_document(Path(CONFIG))
    document.tree["rollout_matching"]["vllm"] |= vllm
    return parse_settings(document.tree, World(learners)).settings


def servers(*urls):
    return {"servers": [{"base_url": url, "group_port": 51000 + k} for k, url in enumerate(urls)]}


@pytest.mark.scenario("R10.C8", on="pure")
def test_each_server_gets_its_gpu_and_its_index_and_the_learner_the_rest():
    plan = make_plan(settings(), LaunchOptions(CONFIG, "0,1,2", "3"))
    assert [server.part.env["CUDA_VISIBLE_DEVICES"] for server in plan.servers] == ["0", "1", "2"]
    assert [server.world_size for server in plan.servers] == [1, 1, 1]
    assert [(server.base_url[-5:], server.group_port) for server in plan.servers] == [
        (":8000", 51216),
        (":8001", 51217),
        (":8002", 51218),
    ]
    serve = (sys.executable, "-m", "coordexp", "serve", "--config", CONFIG, "--index", "2")
    assert plan.servers[2].part.command == serve
    assert plan.learner.command == (sys.executable, "-m", "coordexp", "train", "--config", CONFIG)
    assert plan.learner.env["CUDA_VISIBLE_DEVICES"] == "3"
    assert not plan.learner.ranks


def test_gpus_are_split_by_the_tensor_parallel_size():
    plan = make_plan(settings(tensor_parallel_size=2), LaunchOptions(CONFIG, "0,1,2,3,6,7", "4"))
    assert [server.part.gpus for server in plan.servers] == [(0, 1), (2, 3), (6, 7)]
    assert [server.world_size for server in plan.servers] == [2, 2, 2]


@pytest.mark.scenario("R08.S1", on="pure")
def test_one_server_over_three_gpus_has_three_replicas():
    replicated = settings(data_parallel_size=3, server=servers("http://127.0.0.1:8000"))
    plan = make_plan(replicated, LaunchOptions(CONFIG, "0,1,2", "3"))
    assert [server.part.env["CUDA_VISIBLE_DEVICES"] for server in plan.servers] == ["0,1,2"]
    assert [server.world_size for server in plan.servers] == [3]
    assert plan.learner.env["CUDA_VISIBLE_DEVICES"] == "3"


def test_replicas_of_several_gpus_get_all_of_theirs():
    large = settings(
        tensor_parallel_size=2,
        data_parallel_size=2,
        server=servers("http://127.0.0.1:8000", "http://127.0.0.1:8001"),
    )
    plan = make_plan(large, LaunchOptions(CONFIG, "0,1,2,3,4,5,6,7", "8"))
    assert [server.part.gpus for server in plan.servers] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_several_learners_run_under_torchrun():
    plan = make_plan(settings(), LaunchOptions(CONFIG, "0,1,2", "3, 4", resume=True))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    assert plan.learner.command == (*torchrun, "-m", "coordexp", "train", "--config", CONFIG, "--resume")
    assert plan.learner.ranks
    assert plan.learners == 2


def test_on_the_cpu_no_part_sees_a_gpu():
    plan = make_plan(settings(), LaunchOptions(CONFIG, cpu=True, learners=2))
    parts = [plan.learner, *(server.part for server in plan.servers)]
    assert {part.env["CUDA_VISIBLE_DEVICES"] for part in parts} == {""}
    assert plan.learners == 2


def test_servers_on_this_machine_are_started_and_others_are_not():
    run_settings = settings(server=servers("http://127.0.0.1:8000", "http://node2:8000"))
    plan = make_plan(run_settings, LaunchOptions(CONFIG, "0", "1"))
    assert [server.name for server in plan.local_servers] == ["server 0"]
    assert plan.servers[1].world_size is None


@pytest.mark.parametrize(
    ("options", "subjects"),
    [
        ({"server_gpus": "0,1,1", "train_gpus": "1"}, ["--server-gpus", "--train-gpus"]),
        ({"server_gpus": "0,one,2", "train_gpus": ""}, ["--server-gpus", "--train-gpus"]),
        ({"server_gpus": "0,1", "train_gpus": "3"}, ["--server-gpus"]),
        ({}, ["--train-gpus", "--server-gpus"]),
        ({"server_gpus": "0,1,2", "train_gpus": "3", "learners": 2}, ["--learners"]),
        ({"server_gpus": "0", "train_gpus": "3", "start_servers": False}, ["--server-gpus"]),
    ],
)
def test_all_options_that_do_not_fit_are_refused_at_once(options, subjects):
    with pytest.raises(ConfigError) as caught:
        make_plan(settings(), LaunchOptions(CONFIG, **options))
    assert list(dict.fromkeys(finding.subject for finding in caught.value.findings)) == subjects


def test_no_servers_starts_none():
    plan = make_plan(settings(), LaunchOptions(CONFIG, train_gpus="0", start_servers=False))
    assert plan.local_servers == ()
    assert len(plan.servers) == 3


@pytest.mark.scenario("R15.C2", on="pure")
def test_replicas_are_decoding_slots_of_their_own():
    replicas = {"data_parallel_size": 3, "server": servers("http://127.0.0.1:8000")}
    plan = make_plan(settings(learners=96, **replicas), LaunchOptions(CONFIG, cpu=True, learners=96))
    assert plan.learners == 96
    with pytest.raises(ConfigError):
        settings(learners=97, **replicas)


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:1", True),
        ("http://127.1.2.3:1", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://0.0.0.0:1", False),
        ("http://10.0.0.1:1", False),
        ("http://localhost.example.org:1", False),
    ],
)
def test_only_loopback_addresses_are_on_this_machine(url, here):
    assert is_loopback(url) is here

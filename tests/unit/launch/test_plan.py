"""Plans: the commands and devices that follow from settings and lists of GPUs."""

import sys
from pathlib import Path

import pytest

from coordexp.config import ConfigError, World, load_settings, parse_settings
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


def refusal_of(run_settings, **options):
    """Return the message with which a plan is refused."""
    with pytest.raises(ConfigError) as caught:
        make_plan(run_settings, LaunchOptions(CONFIG, **options))
    return str(caught.value)


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
    message = refusal_of(large, server_gpus="0,1,2,3", train_gpus="8")
    assert "4 GPUs, and the config has 2 servers on this machine with 4 GPUs each" in message
    assert "give 8 GPUs, or list 1 servers" in message
    assert "set vllm.data_parallel_size: 1, or set vllm.tensor_parallel_size: 1" in message


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


def test_no_servers_starts_none():
    plan = make_plan(settings(), LaunchOptions(CONFIG, train_gpus="0", start_servers=False))
    assert plan.local_servers == ()
    assert len(plan.servers) == 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"server_gpus": "0,1", "train_gpus": "3"}, "2 GPUs, and the config has 3 servers"),
        ({"server_gpus": "0,1,2", "train_gpus": "2"}, "GPU 2 is in --server-gpus too"),
        ({"server_gpus": "0,1,1", "train_gpus": "3"}, "names a GPU twice"),
        ({"server_gpus": "0,one,2", "train_gpus": "3"}, "'0,one,2' is not a list of GPU numbers"),
        ({"server_gpus": "0,1,2", "train_gpus": ""}, "'' is not a list of GPU numbers"),
        ({"server_gpus": "0,1,2", "train_gpus": "-1"}, "'-1' is not a list of GPU numbers"),
        ({"server_gpus": "0,1,2"}, "--train-gpus: missing"),
        ({"train_gpus": "3"}, "--server-gpus: missing"),
        ({"server_gpus": "0,1,2", "cpu": True}, "0,1,2 was given together with --cpu"),
        ({"server_gpus": "0,1,2", "train_gpus": "3", "learners": 2}, "--learners: is only for --cpu"),
        ({"server_gpus": "0", "train_gpus": "3", "start_servers": False}, "--no-servers starts no server"),
    ],
)
def test_a_command_line_that_does_not_fit_is_refused(options, problem):
    assert problem in refusal_of(settings(), **options)


def test_the_message_about_the_number_of_gpus_lists_all_fixes():
    message = refusal_of(settings(), server_gpus="0,1,2,4,5,6", train_gpus="3")
    assert "give 3 GPUs, or list 6 servers" in message
    assert "set vllm.data_parallel_size: 2, or set vllm.tensor_parallel_size: 2" in message


def test_all_problems_are_reported_at_once():
    message = refusal_of(settings(), server_gpus="0,0", train_gpus="0")
    assert "names a GPU twice" in message
    assert "GPU 0 is in --server-gpus too" in message
    assert "2 GPUs, and the config has 3 servers" in message


def test_more_learners_than_decoding_slots_are_refused_before_the_start():
    run_settings = settings(learners=97)
    message = refusal_of(run_settings, cpu=True, learners=97)
    assert "32 on 3 rollout devices is 96 requests at once, and 97 learner ranks each need one" in message
    assert make_plan(run_settings, LaunchOptions(CONFIG, cpu=True, learners=96)).learners == 96


@pytest.mark.scenario("R15.C2", on="pure")
def test_replicas_are_decoding_slots_of_their_own():
    run_settings = settings(learners=96, data_parallel_size=3, server=servers("http://127.0.0.1:8000"))
    assert make_plan(run_settings, LaunchOptions(CONFIG, cpu=True, learners=96)).learners == 96
    message = refusal_of(run_settings, cpu=True, learners=97)
    assert "32 on 3 rollout devices is 96 requests at once, and 97 learner ranks each need one" in message


def test_a_run_without_servers_is_refused():
    colocated = load_settings("configs/stage2-colocate.yaml", World(1)).settings
    assert "no rollout servers to start" in refusal_of(colocated, cpu=True)
    first_stage = load_settings("configs/stage1.yaml", World(1)).settings
    assert "makes no rollouts" in refusal_of(first_stage, cpu=True)


def test_if_all_servers_are_elsewhere_the_option_no_servers_is_required():
    run_settings = settings(server=servers("http://node2:8000", "http://10.0.0.3:8000"))
    assert "none of the 2 servers is on this machine" in refusal_of(
        run_settings, server_gpus="0,1", train_gpus="2"
    )
    assert "coordexp serve --config X --index i --host H" in refusal_of(run_settings, cpu=True)


def test_a_server_that_is_started_here_listens_at_a_plain_address():
    urls = ("https://127.0.0.1:8000", "http://127.0.0.1:8001/api", "http://127.0.0.2:8002", "http://[::1]:8003")
    run_settings = settings(server=servers(*urls))
    message = refusal_of(run_settings, cpu=True)
    assert "servers[0].base_url: https://127.0.0.1:8000 is not" in message
    assert "servers[1].base_url: http://127.0.0.1:8001/api is not" in message
    assert "servers[2].base_url: http://127.0.0.2:8002 is not" in message
    assert "servers[3]" not in message


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

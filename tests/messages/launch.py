"""Messages about plans of a launch that cannot be, and about machines that are too small."""

from coordexp.cli.check import data_problems, missing_files
from coordexp.config import World, load_settings
from coordexp.launch import preflight
from coordexp.launch.plan import LaunchOptions, make_plan
from tests.messages import provoke
from tests.unit.launch.test_plan import CONFIG, servers, settings
from tests.unit.launch.test_preflight import (
    GB,
    SMALL_GPUS,
    SPOILT,
    gpu_memory_problems,
    load,
    write_config,
)


def plan(run_settings, **options):
    make_plan(run_settings, LaunchOptions(CONFIG, **options))


@provoke(
    {"server_gpus": "0,1", "train_gpus": "3"},
    {"server_gpus": "0,1,2", "train_gpus": "2"},
    {"server_gpus": "0,1,1", "train_gpus": "3"},
    {"server_gpus": "0,one,2", "train_gpus": "3"},
    {"server_gpus": "0,1,2", "train_gpus": ""},
    {"server_gpus": "0,1,2", "train_gpus": "-1"},
    {"server_gpus": "0,1,2"},
    {"train_gpus": "3"},
    {"server_gpus": "0,1,2", "cpu": True},
    {"server_gpus": "0,1,2", "train_gpus": "3", "learners": 2},
    {"server_gpus": "0", "train_gpus": "3", "start_servers": False},
    {"server_gpus": "0,1,2,4,5,6", "train_gpus": "3"},
)
def a_launch_with(folder, options):
    plan(settings(), **options)


@provoke("0,1,2,3")
def two_servers_of_two_replicas_on_two_gpus_each_with(folder, gpus):
    two = servers("http://127.0.0.1:8000", "http://127.0.0.1:8001")
    plan(settings(tensor_parallel_size=2, data_parallel_size=2, server=two), server_gpus=gpus, train_gpus="8")


@provoke()
def more_learners_than_decoding_slots(folder):
    plan(settings(learners=97), cpu=True, learners=97)


@provoke("stage2-colocate", "stage1")
def a_launch_without_servers(folder, name):
    plan(load_settings(f"configs/{name}.yaml", World(1)).settings, cpu=True)


@provoke({"server_gpus": "0,1", "train_gpus": "2"}, {"cpu": True})
def servers_on_other_machines(folder, options):
    plan(settings(server=servers("http://node2:8000", "http://10.0.0.3:8000")), **options)


@provoke("https://127.0.0.1:8000", "http://127.0.0.1:8001/api", "http://127.0.0.2:8002")
def a_server_here_with_the_address(folder, url):
    plan(settings(server=servers(url)), cpu=True)


@provoke(*SPOILT)
def a_config_with(folder, name):
    config = write_config(folder)
    SPOILT[name](folder)
    settings = load(config)
    problems = [*missing_files(settings), *data_problems(settings, []), *preflight.model_problems(settings)]
    return "\n".join(map(str, problems)).replace(f"{folder}-elsewhere", "ELSEWHERE")


@provoke(*SMALL_GPUS)
def gpus_of_so_many_gb_total_and_free(folder, memory):
    return gpu_memory_problems(write_config(folder), *memory)


@provoke({}, {0: 80, 1: 80})
def gpus_that_are_missing(folder, memory):
    gpus = {gpu: preflight.DeviceMemory(gb * GB, gb * GB) for gpu, gb in memory.items()}
    return preflight.gpu_problems(LaunchOptions("x.yaml", "0,1,2", "3"), gpus)

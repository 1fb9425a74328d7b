"""The checks before anything is started, on a machine that each test sets up."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.cli.launch import describe_metrics
from coordexp.config import World, load_settings
from coordexp.demo.model import make_tokenizer
from coordexp.errors import UserError
from coordexp.launch import preflight
from coordexp.launch.fit import GpuSplit, PlannedModel, Planner, SampleSize
from coordexp.launch.memory import GIB, format_bytes
from coordexp.launch.plan import LaunchOptions, Part, Plan, PlannedServer, make_plan
from coordexp.launch.preflight import DeviceMemory
from tests.vocabularies import table

CONFIG = Path("configs/stage2-server-3v1.yaml").resolve()
RECORD = {"image": "1.png", "width": 8, "height": 8, "space": "pixel", "objects": []}
SHAPES = {"model.embed_tokens.weight": (1000, 1000), "model.layers.0.q_proj.weight": (3000, 1000)}
MODEL = {
    "model_type": "qwen3_vl",
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 1000,
    },
    "vision_config": {
        "hidden_size": 16,
        "depth": 2,
        "num_heads": 2,
        "intermediate_size": 32,
        "deepstack_visual_indexes": [1],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
    },
}
GB = 10**9


def free_ports(count):
    probes = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture
def config(tmp_path):
    """Return a config with three servers, a model and data that fit together."""
    folder = tmp_path / "model"
    folder.mkdir()
    table("random-1").tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    header = json.dumps(
        {"__metadata__": {}} | {name: {"dtype": "BF16", "shape": shape} for name, shape in SHAPES.items()}
    ).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD))
    (tmp_path / "1.png").touch()
    ports = free_ports(6)
    tree = {
        "extends": [os.path.relpath(CONFIG, tmp_path)],
        "model": {"path": str(folder)},
        "custom": {"train_jsonl": str(tmp_path / "train.jsonl"), "val_jsonl": str(tmp_path / "train.jsonl")},
        "rollout_matching": {"vllm": {"gpu_memory_utilization": 0.1, "server": {"servers": [
            {"base_url": f"http://127.0.0.1:{ports[2 * k]}", "group_port": ports[2 * k + 1]} for k in range(3)
        ]}}},
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def load(config):
    return load_settings(config, World(1)).settings


def messages(problems):
    return "\n".join(map(str, problems))


def test_a_config_that_fits_has_no_problems(config):
    settings = load(config)
    assert messages(preflight.settings_problems(settings, LaunchOptions("x"))) == ""
    assert messages(preflight.port_problems(settings, LaunchOptions(str(config), cpu=True))) == ""


def test_a_port_in_use_is_reported_with_its_setting(config):
    servers = load(config).rollout_matching.vllm.server.servers
    http = int(servers[1].base_url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", http)), socket.create_server(("", servers[2].group_port)):
        reported = messages(preflight.port_problems(load(config), LaunchOptions(str(config), cpu=True)))
        assert f"servers[1].base_url: port {http}: address already in use" in reported
        assert f"servers[2].group_port: port {servers[2].group_port}: address already in use" in reported
        assert "servers[0]" not in reported
        elsewhere = LaunchOptions(str(config), cpu=True, start_servers=False)
        assert messages(preflight.port_problems(load(config), elsewhere)) == ""


def test_missing_files_a_wrong_vocabulary_and_bad_records_are_all_reported(config, tmp_path):
    (tmp_path / "model/tokenizer.json").unlink()
    (tmp_path / "train.jsonl").write_text('{"image": 5}')
    reported = messages(preflight.settings_problems(load(config), LaunchOptions("x")))
    assert "tokenizer.json: no such file" in reported
    assert "coordexp model add-coords" in reported
    assert "custom.train_jsonl:" in reported
    assert "train.jsonl:1: missing keys" in reported
    (tmp_path / "train.jsonl").unlink()
    assert "train.jsonl does not exist" in messages(preflight.settings_problems(load(config), LaunchOptions("x")))


def test_native_answers_need_no_coordinate_tokens_a_family_that_has_them_and_boxes(config, tmp_path):
    tree = yaml.safe_load(config.read_text()) | {
        "extends": [os.path.relpath(Path("configs/stage1-native.yaml"), tmp_path)],
        "rollout_matching": {},
    }
    config.write_text(yaml.safe_dump(tree))
    tokenizer = make_tokenizer("small", coords=False).backend_tokenizer
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    assert messages(preflight.settings_problems(load(config), LaunchOptions("x"))) == ""
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL | {"model_type": "qwen2_5_vl"}))
    leaf = {"desc": "leaf", "poly": [1, 1, 5, 1, 3, 5]}
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps(RECORD | {"objects": [leaf]}))
    reported = messages(preflight.settings_problems(load(config), LaunchOptions("x")))
    assert "qwen2_5_vl do not write boxes as numbers from 0 to 1000" in reported
    assert reported.count("train.jsonl:2 has a polygon, and native answers only boxes") == 1  # not of val_jsonl


def test_images_that_servers_may_not_read_are_reported_with_the_fix(config, tmp_path):
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (tmp_path / "1.png").rename(elsewhere / "1.png")
    (tmp_path / "1.png").symlink_to(elsewhere / "1.png")
    reported = messages(preflight.settings_problems(load(config), LaunchOptions("x")))
    assert "which servers may not read" in reported and f"--images {elsewhere}" in reported
    assert messages(preflight.settings_problems(load(config), LaunchOptions("x", images=(str(elsewhere),)))) == ""


def test_the_images_of_the_first_records_must_exist(config, tmp_path):
    (tmp_path / "1.png").unlink()
    assert "train.jsonl: 1.png does not exist\n" in messages(
        preflight.settings_problems(load(config), LaunchOptions("x"))
    )
    (tmp_path / "train.jsonl").write_text("")
    assert "has no records" in messages(preflight.settings_problems(load(config), LaunchOptions("x")))


def test_gpus_must_exist_and_be_allowed(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    four = {gpu: DeviceMemory(80 * GB, 80 * GB) for gpu in range(4)}
    options = LaunchOptions("x.yaml", "0,1,2", "3")
    assert messages(preflight.gpu_problems(options, four)) == ""
    assert "--train-gpus: 3: this machine has GPUs 0, 1" in messages(
        preflight.gpu_problems(options, {0: four[0], 1: four[1]})
    )
    assert "has no visible GPU" in messages(preflight.gpu_problems(options, {}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    assert "--server-gpus: 2 is not in CUDA_VISIBLE_DEVICES=0,1,3" in messages(
        preflight.gpu_problems(options, four)
    )


def test_memory_is_counted_from_headers(config):
    settings = load(config)
    plan = make_plan(settings, LaunchOptions(str(config), cpu=True))
    needed = {need.part: need.bytes for need in preflight.estimate_needs(plan, settings, config.parent / "model")}
    cache = 2 * 2 * 2 * 8 * settings.rollout_matching.vllm.max_model_len * 2
    assert needed["server 0"] == 4_000_000 * 2 + cache
    assert needed["learner"] == 4_000_000 * 4 * 4  # weights, gradients, two states of Adam, all in float32


def test_every_replica_needs_memory_for_all_weights(config):
    tree = yaml.safe_load(config.read_text())
    tree["rollout_matching"]["vllm"] |= {"data_parallel_size": 2}
    config.write_text(yaml.safe_dump(tree))
    settings = load(config)
    plan = make_plan(settings, LaunchOptions(str(config), cpu=True))
    needed = preflight.estimate_needs(plan, settings, config.parent / "model")
    assert "weights 7.6 MiB" in str(needed[0])  # on each device
    servers, learner = 2 * sum(need.bytes for need in needed[:-1]), needed[-1].bytes
    total = format_bytes(servers + learner)
    (refusal,) = preflight.machine_memory_problems(plan, settings, needed, DeviceMemory(GB, 90_000_000))
    assert f"the parts need at least {total}" in str(refusal)
    (warning,) = preflight.machine_memory_problems(plan, settings, needed, DeviceMemory(GB, GB // 2))
    assert "each of 6 workers of the servers may take a share of 0.1" in str(warning)


def test_with_an_adapter_only_the_adapter_needs_memory_for_an_optimizer(config):
    tree = yaml.safe_load(config.read_text())
    tree["model"]["adapter"] = {"type": "lora", "rank": 4, "alpha": 8}
    config.write_text(yaml.safe_dump(tree))
    plan = make_plan(load(config), LaunchOptions(str(config), cpu=True))
    learner = preflight.estimate_needs(plan, load(config), config.parent / "model")[-1]
    trained = 4 * (3000 + 1000) + 1000 * 1000  # the adapter, and the rows of the coordinate tokens
    assert learner.bytes == 4_000_000 * 2 + trained * 4 * 4


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        (DeviceMemory(40 * GB, 40 * GB), ""),
        (
            DeviceMemory(GB, GB // 20),
            "GPU 0 has 47.7 MiB free of 953.7 MiB, and server 0 takes a share of 0.1 (95.4 MiB)",
        ),
        (
            DeviceMemory(GB // 20, GB // 20),
            "server 0 needs at least 9.6 MiB (weights 7.6 MiB, one longest sequence 2.0 MiB)",
        ),
        (
            DeviceMemory(GB // 50, GB // 50),
            "learner needs at least 61.0 MiB (weights (4 bytes each) 15.3 MiB, optimizer states 30.5 MiB, "
            "gradients (float32) 15.3 MiB)",
        ),
        (DeviceMemory(GB // 10, GB // 10), "learner is likely to need"),
        (DeviceMemory(10 * GB, 10 * GB), "server 0 is likely to need"),
    ],
)
def test_missing_memory_is_reported_with_the_numbers(config, gpu, problem):
    settings = load(config)
    plan = make_plan(settings, LaunchOptions(str(config), "0,1,2", "3"))
    _, reported = preflight.memory_problems(plan, settings, dict.fromkeys(range(4), gpu))
    assert problem in messages(reported) if problem else not reported


def test_on_the_cpu_all_parts_share_the_memory(config):
    settings = load(config)
    plan = make_plan(settings, LaunchOptions(str(config), cpu=True))
    needed = preflight.estimate_needs(plan, settings, config.parent / "model")
    (refusal,) = preflight.machine_memory_problems(plan, settings, needed, DeviceMemory(GB, 90_000_000))
    assert "the parts need at least 89.8 MiB" in str(refusal)
    (warning,) = preflight.machine_memory_problems(plan, settings, needed, DeviceMemory(GB, GB // 5))
    assert warning.severity == "warning"
    assert "each of 3 workers of the servers may take a share of 0.1" in warning.problem
    assert "lower rollout_matching.vllm.gpu_memory_utilization" in warning.fix
    assert list(preflight.machine_memory_problems(plan, settings, needed, DeviceMemory(GB, GB))) == []


def test_a_launch_and_a_plan_estimate_the_same_learner(config):
    settings, folder = load(config), config.parent / "model"
    need = preflight.estimate_needs(make_plan(settings, LaunchOptions("x", "0,1,2", "3")), settings, folder)[-1]
    planner = Planner(PlannedModel.from_folder(folder), SampleSize(), GpuSplit((0, 1, 2), (3,)), 80 * GIB)
    assert need.likely == planner.learner(settings).bytes
    assert need.bytes == planner.learner(settings).least_bytes


def test_a_model_that_the_formulas_are_not_for_is_not_estimated(config):
    plan = make_plan(load(config), LaunchOptions(str(config), cpu=True))
    file = config.parent / "model/config.json"
    file.write_text(json.dumps({"model_type": "other"}))
    assert preflight.estimate_needs(plan, load(config), file.parent) == []
    file.write_text(json.dumps({"model_type": "qwen3_vl"}))
    _, (problem,) = preflight.memory_problems(plan, load(config), None)
    assert "config.json cannot be read: KeyError('text_config')" in str(problem)


def test_gpus_are_found_by_nvidia_smi(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '0, 81920, 81000\\n1, 81920, 5\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert preflight.find_gpus() == {
        0: DeviceMemory(81920 * 2**20, 81000 * 2**20),
        1: DeviceMemory(81920 * 2**20, 5 * 2**20),
    }


def test_a_run_without_servers_is_refused_for_that_alone_wherever_vllm_is_installed(monkeypatch, capsys):
    def miss(_):
        raise UserError("vLLM is not installed")

    monkeypatch.setattr(preflight, "check_vllm", miss)
    config = "configs/demo/coco-cpu.yaml"
    result = CliRunner().invoke(app, ["launch", "--config", config, "--cpu", "--check-only", "--json"])
    subjects = {finding["subject"] for finding in json.loads(result.stdout)["findings"]}
    assert "custom.trainer_variant" in subjects or "rollout_matching.vllm.mode" in subjects
    assert "vllm" not in subjects


def test_check_only_prints_the_plan_and_starts_nothing(config):
    result = CliRunner().invoke(
        app, ["launch", "--config", str(config), "--cpu", "--learners", "2", "--check-only"]
    )
    assert result.exit_code == 0, result.output
    assert "server 2" in result.output
    assert f"serve --config {config} --index 2" in result.output
    assert "--nproc_per_node 2 -m coordexp train" in result.output


def test_the_plan_as_json_has_every_part_with_its_command_and_memory(config):
    command = ["launch", "--config", str(config), "--cpu", "--learners", "2", "--check-only", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True and report["checked"] == str(config)
    plan, memory = report["details"]["plan"], report["details"]["memory"]
    assert [server["part"]["command"][-1] for server in plan["servers"]] == ["0", "1", "2"]
    assert plan["servers"][0]["world_size"] == 1 and plan["learners"] == 2
    assert memory["server 2"] > 8_000_000 and memory["learner"] == 80_000_000  # with the gradient buckets of DDP


def test_a_launch_that_is_impossible_reports_all_problems_and_starts_nothing(config):
    command = ["launch", "--config", str(config), "--server-gpus", "0,1", "--train-gpus", "1"]
    (config.parent / "train.jsonl").unlink()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    for problem in ("2 GPUs, and the config has 3", "GPU 1 is in --server-gpus too", "train.jsonl does not exist"):
        assert problem in result.output
    assert result.output.endswith("nothing was started\n")


def test_a_wrong_config_is_reported_together_with_a_wrong_command_line():
    result = CliRunner().invoke(
        app, ["launch", "--config", "examples/check/ten-mistakes.yaml", "--server-gpus", "x"]
    )
    assert result.exit_code == 2
    assert "--server-gpus: 'x' is not a list of GPU numbers" in result.output
    assert "servers[0].unknown_flag: unknown key" in result.output


def test_the_launcher_imports_no_torch(config):
    code = (
        "import sys; from coordexp.cli import app; "
        f"app(['launch', '--config', {str(config)!r}, '--cpu', '--check-only'], standalone_mode=False); "
        "import coordexp.launch.processes; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_launch_gives_its_parts_a_new_token_and_returns_the_exit_code_of_the_learner(config, tmp_path):
    """This runs the whole command, with a small script in place of `coordexp serve` and `coordexp train`."""
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN)
    run = subprocess.run(
        [sys.executable, str(stand_in), "launch", "--config", str(config), "--cpu", "--learners", "1"],
        env={k: v for k, v in os.environ.items() if k != "COORDEXP_SERVER_TOKEN"} | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert run.returncode == 5, run.stdout + run.stderr
    assert "server 2 | serving with a token of 43 characters" in run.stdout
    assert "learner  | training with a token of 43 characters" in run.stdout
    command = r'metrics of server 0 \(and of 2 more\): curl -H "Authorization: Bearer \$\(cat (\S+)\)"'
    file = re.search(command, run.stdout)[1]
    assert f"learner  | {file} has the token, in a folder of mode 0o500" in run.stdout
    assert not Path(file).exists()
    assert (tmp_path / "token").read_text() not in run.stdout + run.stderr


def test_the_way_to_the_metrics_names_the_variable_of_a_token_that_the_user_has_set():
    servers = (PlannedServer(0, "http://127.0.0.1:8000", 1, 1, None),)
    plan = Plan(servers, Part("learner", ()), 1, decode_batch_size=1)
    header = '-H "Authorization: Bearer $COORDEXP_SERVER_TOKEN"'
    command = f"metrics of server 0: curl {header} http://127.0.0.1:8000/metrics"
    assert describe_metrics(plan, "$COORDEXP_SERVER_TOKEN") == command
    assert describe_metrics(plan, None) == "metrics of server 0: curl http://127.0.0.1:8000/metrics"


STAND_IN = """
import os, sys
from pathlib import Path
from urllib.parse import urlsplit

def serve(config, index):
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from coordexp.config import load_settings
    class FakeServer(BaseHTTPRequestHandler):
        def do_GET(self):
            allowed = self.path == "/health/" or self.headers["Authorization"] == "Bearer " + token
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(b'{"world_size": 1}')
        def log_message(self, *_):
            pass
    server = load_settings(config).settings.rollout_matching.vllm.server.servers[index]
    print("serving with a token of", len(token), "characters")
    HTTPServer(("127.0.0.1", urlsplit(server.base_url).port), FakeServer).serve_forever()

token = os.environ.get("COORDEXP_SERVER_TOKEN", "")
if sys.argv[1] == "serve":
    serve(sys.argv[3], int(sys.argv[5]))
elif sys.argv[1] == "train":
    print("training with a token of", len(token), "characters")
    import psutil
    folders = [Path(f"/proc/{parent.pid}/fd") for parent in psutil.Process().parents()[:2]]
    opened = [item for folder in folders for item in folder.iterdir()]
    (file,) = [item for item in opened if "coordexp-token" in os.readlink(item)]
    if file.read_text() == token:
        print(file, "has the token, in a folder of mode", oct(file.parent.stat().st_mode & 0o777))
    (Path(os.environ["TMPDIR"]) / "token").write_text(token)
    sys.exit(5)
else:
    from coordexp.cli import main
    from coordexp.launch import plan
    from coordexp.launch.parts import RunningPart
    start = RunningPart.__init__
    def start_script(self, part, extra):
        words = part.command[part.command.index("coordexp") + 1:]
        start(self, plan.Part(part.name, (sys.executable, __file__, *words), part.env), extra)
        self.part = part
    RunningPart.__init__ = start_script
    main(sys.argv[1:])
"""


def with_data(config, **custom):
    tree = yaml.safe_load(config.read_text())
    tree["custom"] = custom
    config.write_text(yaml.safe_dump(tree))
    return messages(preflight.settings_problems(load(config), LaunchOptions("x")))


def test_every_file_of_every_data_set_is_checked_and_named(config, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").touch()
        (tmp_path / name / "part-0.jsonl").write_text(json.dumps(RECORD))
    other = RECORD | {"image": "../b/1.png"}
    (tmp_path / "a/part-1.jsonl").write_text(json.dumps(other))
    sets = [{"path": str(tmp_path / "a/part-*.jsonl")}, {"path": [str(tmp_path / "b/part-0.jsonl")]}]
    validation = {"val_jsonl": str(tmp_path / "b/*.jsonl")}
    assert with_data(config, train_jsonl=None, train_data=sets, **validation) == "", "servers read a and b"
    (tmp_path / "a/part-1.jsonl").write_text(json.dumps(RECORD | {"image": "2.png"}))
    (tmp_path / "b/part-0.jsonl").write_text("{}")
    reported = with_data(config, train_jsonl=None, train_data=sets, **validation)
    assert "custom.train_data[0].path: " in reported and "a/part-1.jsonl: 2.png does not exist" in reported
    assert "custom.train_data[1].path: " in reported and "b/part-0.jsonl:1: missing keys" in reported
    assert "custom.val_jsonl: " in reported
    reported = with_data(config, train_jsonl=[str(tmp_path / "none-*")])
    assert "custom.train_jsonl: no file matches" in reported and "paths are relative" in reported

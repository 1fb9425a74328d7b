"""The files in deploy/ say what the code does: their commands and configs are valid, their metrics exist, and the
Slurm scripts start and end what they should. Slurm and coordexp are fakes here, named so."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry

from coordexp.cli import app
from coordexp.config import load_settings
from coordexp.servers.app import ServerMetrics
from coordexp.train.sinks import HELP

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NODES = ["n1", "n2", "n3"]
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes/coordexp.yaml").read_text()))
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())


def parse(words):
    """Return the options of a coordexp command as the real command line reads them."""
    commands = typer.main.get_command(app)
    return commands.commands[words[0]].make_context(words[0], list(words[1:])).params


def servers_of(options):
    settings = load_settings(options["config"], overrides=options["overrides"] or ()).settings
    return [server.base_url for server in settings.rollout_matching.vllm.server.servers]


def test_the_commands_of_the_compose_file_are_those_of_its_servers_and_learner(monkeypatch):
    monkeypatch.chdir(ROOT)
    options = {name: parse(service["command"]) for name, service in COMPOSE["services"].items()}
    assert servers_of(options["learner"]) == ["http://server-0:8000", "http://server-1:8000"]
    assert options["learner"]["no_servers"] and options["learner"]["resume"]
    for index in (0, 1):
        server = options[f"server-{index}"]
        assert (server["index"], server["host"]) == (index, "0.0.0.0")
    assert not any("ports" in service for service in COMPOSE["services"].values())


def test_the_pods_of_kubernetes_run_the_servers_that_their_config_lists(tmp_path, monkeypatch):
    items = {item["kind"]: item for item in KUBERNETES}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.yaml").write_text(items["ConfigMap"]["data"]["run.yaml"])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    (learner,) = items["Job"]["spec"]["template"]["spec"]["containers"]
    (server,) = items["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    replicas, name = items["StatefulSet"]["spec"]["replicas"], items["StatefulSet"]["metadata"]["name"]
    service = items["Service"]["metadata"]["name"]
    assert servers_of(parse(learner["args"])) == [f"http://{name}-{i}.{service}:8000" for i in range(replicas)]
    assert parse([word.replace("$(POD_INDEX)", "1") for word in server["args"]])["index"] == 1
    for container in (server, learner):
        (token,) = [item for item in container["env"] if item["name"] == "COORDEXP_SERVER_TOKEN"]
        assert "secretKeyRef" in token["valueFrom"]


def test_containers_run_as_another_user_than_root():
    for file in DEPLOY.glob("Dockerfile.*"):
        assert re.findall(r"^USER (\d+)$", file.read_text(), re.MULTILINE) == ["10001"]
    for item in KUBERNETES:
        if item["kind"] in ("StatefulSet", "Job"):
            assert item["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 10001


def test_the_image_for_gpus_has_the_vllm_release_of_the_package():
    releases = re.findall(r"^FROM vllm/vllm-openai:v(\S+)", (DEPLOY / "Dockerfile.gpu").read_text(), re.MULTILINE)
    pinned = re.search(r"^vllm==(\S+)$", (ROOT / "constraints-gpu.txt").read_text(), re.MULTILINE)
    assert pinned and set(releases) == {pinned[1]}


def test_every_file_that_an_image_copies_is_part_of_the_build_context():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all(list(ROOT.glob(name)) for name in kept)
    for file in DEPLOY.glob("Dockerfile.*"):
        for source in re.findall(r"^COPY (?!--from)(?!\. )(\S+)", file.read_text(), re.MULTILINE):
            assert source in kept, f"{file.name} copies {source}"


# Grafana and Prometheus.


def queries() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana/coordexp.json").read_text())
    variables = [item["query"] for item in dashboard["templating"]["list"]]
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return panels + variables + [rule["expr"] for rule in rules]


def exported_names() -> set[str]:
    """Return the names of all samples that servers and learners export."""
    metrics = ServerMetrics(CollectorRegistry())
    metrics.requests.labels("answered")
    metrics.updates.labels("committed")
    families = metrics.registry.collect()
    return {sample.name for family in families for sample in family.samples} | {
        f"coordexp_learner_{name}" for name in HELP
    }


def test_every_metric_in_the_dashboard_and_the_alerts_is_exported_and_every_exported_one_is_shown():
    used = set(re.findall(r"\bcoordexp_\w+", " ".join(queries())))
    exported = {name for name in exported_names() if not name.endswith("_created")}
    assert used <= exported
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in used}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in exported} == shown


def test_every_metric_of_vllm_in_the_dashboard_exists_in_this_release():
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed, as in the tests on Python 3.12")
    source = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    used = set(re.findall(r"vllm:\w+", " ".join(queries())))
    assert used and all(f'"{name}"' in source for name in used)


def test_the_dashboard_is_the_one_that_its_tool_writes():
    code = "import json, tools.dashboard as tool; print(json.dumps(tool.make_dashboard()))"
    written = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads((DEPLOY / "grafana/coordexp.json").read_text()) == json.loads(written), (
        "stale: run python tools/dashboard.py"
    )


# Slurm, with fakes of its commands.

FAKE_SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && export FAKE_NODE=${1#--nodelist=}; shift; done
exec "$@"
"""
FAKE_SCONTROL = '#!/usr/bin/env bash\n[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n'
FAKE_COORDEXP = """#!/usr/bin/env bash
part=$1-${FAKE_NODE:-}
printf '%s\\n' "$COORDEXP_SERVER_TOKEN" "$@" > "$FAKE_LOG/$part"
trap 'touch "$FAKE_LOG/$part.stopped"; exit 0' TERM
[ "$1" = launch ] && [ -n "${FAKE_EXIT:-}" ] && { sleep 2; exit "$FAKE_EXIT"; }
while true; do sleep 0.05; done
"""


@pytest.fixture
def slurm(tmp_path):
    """Return the environment of a job with fakes of srun, scontrol and coordexp, and the folder of their notes."""
    tools, notes = tmp_path / "fakes", tmp_path / "notes"
    tools.mkdir()
    notes.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL), ("coordexp", FAKE_COORDEXP)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "8", "FAKE_LOG": str(notes)}
    env = {key: value for key, value in os.environ.items() if key != "COORDEXP_SERVER_TOKEN"}
    return env | job | {"PATH": f"{tools}:{os.environ['PATH']}"}, notes


@contextmanager
def submitted(script, config, *options, env):
    """Run a script as a job in its own process group, of which nothing is left afterwards."""
    command = [DEPLOY / "slurm" / script, ROOT / "configs" / config, *options]
    with subprocess.Popen(command, env=env, start_new_session=True) as job:
        yield job
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_job_on_several_nodes_starts_a_server_on_each_but_the_last_and_ends_with_the_learners_code(slurm):
    env, notes = slurm
    with submitted(
        "several-nodes.sbatch", "stage2-server-24v8.yaml", "--grace", "60", env=env | {"FAKE_EXIT": "7"}
    ) as job:
        code = job.wait(40)
        stopped = [wait_for((notes / f"serve-{node}.stopped").exists) for node in NODES[:-1]]
    assert (code, stopped) == (7, [True, True])
    token, *learner = (notes / "launch-n3").read_text().splitlines()
    options = parse(learner)
    assert servers_of(options) == ["http://n1:8000", "http://n2:8000"]
    assert options["no_servers"] and options["resume"] and options["grace"] == 60
    assert options["train_gpus"] == "0,1,2,3,4,5,6,7"
    assert len(token) == 48
    for index, node in enumerate(NODES[:-1]):
        same, *server = (notes / f"serve-{node}").read_text().splitlines()
        assert same == token and token not in " ".join(server)
        assert (parse(server)["index"], parse(server)["host"]) == (index, "0.0.0.0")
        assert servers_of(parse(server)) == servers_of(options)


def test_sigterm_lets_the_learner_of_several_nodes_end_in_its_own_way_before_the_servers(slurm):
    env, notes = slurm
    with submitted("several-nodes.sbatch", "stage2-server-24v8.yaml", env=env) as job:
        started = wait_for(lambda: all((notes / name).exists() for name in ("launch-n3", "serve-n1", "serve-n2")))
        time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        code = job.wait(40)
        stopped = [wait_for((notes / f"{name}.stopped").exists) for name in ("launch-n3", "serve-n1")]
    assert (started, code, stopped) == (True, 0, [True, True])


def test_a_job_on_one_node_is_the_launch_of_the_config(slurm):
    env, notes = slurm
    with submitted("one-node.sbatch", "stage2-server-3v1.yaml", env=env | {"FAKE_EXIT": "3"}) as job:
        assert job.wait(40) == 3
    options = parse((notes / "launch-").read_text().splitlines()[1:])
    assert (options["server_gpus"], options["train_gpus"], options["resume"]) == ("0,1,2", "3", True)


def test_a_task_of_an_array_and_a_pod_of_an_indexed_job_make_the_shard_of_their_number(slurm, monkeypatch):
    env, notes = slurm
    monkeypatch.chdir(ROOT)
    options = ["--model", "m", "--data", "README.md", "--out", "shards"]
    command = [DEPLOY / "slurm/predict.sbatch", "64", *options]
    assert subprocess.run(command, env=env, capture_output=True).returncode == 1  # it is no array
    with subprocess.Popen(command, env=env | {"SLURM_ARRAY_TASK_ID": "7"}, start_new_session=True) as job:
        started = wait_for((notes / "predict-").exists)
        os.killpg(job.pid, signal.SIGKILL)
    assert started
    assert (notes / "predict-").read_text().split() == ["predict", *options, "--shard", "7/64"]
    assert parse(["predict", *options, "--shard", "7/64"])["shard"] == "7/64"

    (job,) = yaml.safe_load_all((DEPLOY / "kubernetes/predict.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = ["README.md" if "data/train" in word else word for word in container["args"]]
    assert parse(words)["shard"] == f"$(SHARD)/{job['spec']['completions']}"
    (shard,) = [item for item in container["env"] if item["name"] == "SHARD"]
    assert "job-completion-index" in shard["valueFrom"]["fieldRef"]["fieldPath"]
    assert job["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 10001


def test_the_ray_job_gives_options_that_the_example_has_and_an_actor_to_every_gpu():
    job = yaml.safe_load((DEPLOY / "kubernetes/rayjob.yaml").read_text())["spec"]
    words = job["entrypoint"].split()
    options = dict(zip(words[2::2], words[3::2], strict=True))
    example = (ROOT / "examples/ray/predict.py").read_text()
    assert set(options) <= set(re.findall(r'add_argument\("(--[a-z-]+)"', example))
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(options["--actors"]) * int(options["--gpus"]) == group["replicas"] * gpus
    assert group["template"]["spec"]["securityContext"]["runAsUser"] == 10001


def test_the_learner_has_time_to_save_before_slurm_ends_its_job():
    grace = parse(["launch", "--config", str(ROOT / "configs/stage2-server-3v1.yaml"), "--train-gpus", "0"])[
        "grace"
    ]
    for script in (DEPLOY / "slurm").glob("*-node*.sbatch"):
        (seconds,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", script.read_text(), re.MULTILINE)
        assert int(seconds) > grace
    for item in KUBERNETES:
        if item["kind"] == "Job":
            assert item["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > grace

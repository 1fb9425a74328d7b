"""How much faster several workers predict, whether killed ones change the result, and what bare vLLM would take.

    python benchmarks/shards.py --images 2000 --cores 2

One process that is pinned to one core predicts first. Then `coordexp predict --workers` does, with one worker per
core, undisturbed and with two workers killed at random moments. The files of all three are compared byte for byte.
At last, `coordexp predict --backend vllm` and `LLM.generate` answer the same images on one core.

Images per second are counted without the start: the same command is also run for its first batches alone, and
only what the others took longer counts.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from ratios import at_least, show, without_goal

from coordexp.data import RecordFile
from coordexp.demo.scenes import SceneSettings, write_scenes

ROOT = Path(__file__).parents[1]
MODEL, BATCH, TOKENS = "examples/scenes-cpu/model", 16, 192
OPTIONS = ["--model", MODEL, "--batch", str(BATCH), "--max-new-tokens", str(TOKENS)]


def predict(folder: Path, name: str, cores: list[int], *more: str, kills: int = 0) -> float:
    """Run the command on these cores, kill so many workers, and return its seconds."""
    files = ["--data", str(folder / "scenes/val.jsonl"), "--out", str(folder / f"{name}.json")]
    command = [sys.executable, "-m", "coordexp", "predict", *OPTIONS, *files, *more]
    chance, began = random.Random(1), time.monotonic()
    run = subprocess.Popen(pin(cores, command), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    moments = sorted(chance.sample(range(1, 14), kills))  # the number of finished shards, of 16
    while run.poll() is None:
        if moments and len(list((folder / f"{name}.shards").glob("*.json"))) >= moments[0]:
            children = psutil.Process(run.pid).children()
            chance.choice([child for child in children if "spawn_main" in str(child.cmdline())]).kill()
            del moments[0]
        time.sleep(0.01)
    assert run.returncode == 0 and not moments
    return time.monotonic() - began


def pin(cores: list[int], command: list[str]) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


def count_per_second(folder: Path, name: str, cores: list[int], images: int, *more: str) -> float:
    """Return the images that the command answers per second after the first batch of each core."""
    first = BATCH * len(cores)
    start = predict(folder, f"{name}-first", cores, "--limit", str(first), *more)
    return (images - first) / (predict(folder, name, cores, *more) - start)


def count_bare(folder: Path) -> float:
    """Return the images that bare vLLM answers per second, of all but the first batch."""
    from bare import start_bare_engine
    from vllm import SamplingParams

    from coordexp.data.addresses import join_address
    from coordexp.detect.answering import AskedModel
    from coordexp.rollout.prompt import open_image

    records = RecordFile(folder / "scenes/val.jsonl")
    model = AskedModel.load(ROOT / MODEL, None)
    longest = model.count_longest_prompt(records) + TOKENS
    engine = start_bare_engine(ROOT / MODEL, BATCH, longest, 0.1)
    ends = [model.answer_format.table.end_of_turn]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, stop_token_ids=ends)

    def generate(part: list) -> float:
        began = time.monotonic()
        requests = []
        for record in part:
            image = open_image(join_address(records.path.parent, record.image), (record.width, record.height))
            question = model.questions.ask(record)
            requests.append({"prompt": model.prompts.text(question), "multi_modal_data": {"image": image}})
        engine.generate(requests, sampling, use_tqdm=False)
        return time.monotonic() - began

    images = list(records)
    generate(images[:BATCH])
    return (len(images) - BATCH) / generate(images[BATCH:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        print(count_bare(given.bare))
        return
    cores = sorted(os.sched_getaffinity(0))[: given.cores]
    workers = ["--workers", str(given.cores)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_scenes(folder / "scenes", SceneSettings(), train=1, val=given.images, seed=0)
        alone = count_per_second(folder, "alone", cores[:1], given.images)
        shared = count_per_second(folder, "shared", cores, given.images, *workers)
        predict(folder, "killed", cores, *workers, kills=2)
        for name in ("shared", "killed"):
            for suffix in (".json", ".answers.jsonl"):
                same = (folder / f"{name}{suffix}").read_bytes() == (folder / f"alone{suffix}").read_bytes()
                assert same, f"{name}{suffix} differs"
        engine = count_per_second(folder, "engine", cores[:1], given.images, "--backend", "vllm")
        bare = pin(cores[:1], [sys.executable, __file__, "--bare", str(folder)])
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        shown = subprocess.run(bare, env=one_thread, stdout=subprocess.PIPE, text=True, check=True).stdout
    results = {
        "images per second on one core": without_goal(alone),
        f"{given.cores} workers on {given.cores} cores, times as fast": at_least(shared / alone, 1.9),
        "images per second of a vLLM engine on one core": without_goal(engine),
        "of those of bare vLLM": at_least(engine / float(shown.splitlines()[-1]), 0.9),
    }
    show(results, given.json)
    print("with two workers killed, all files are equal, byte for byte", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Write `constraints-hashes.txt`: the packages of `constraints.txt`, each with the sha256 of its wheels.

    python tools/hash_constraints.py --wheel torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl

This needs `uv`, which asks the package index for the wheels for Linux on x86_64 and Python 3.11. `--wheel` is
the file of a package whose tested build is not on the index, such as the CPU build of torch. Only the hash of
that file is then written, because pip would prefer a file from the index if it knew its hash.

    python tools/hash_constraints.py --release

writes `constraints-release.txt` instead: the tools of the release and audit workflows with everything that they
need. This asks pip, and only the package index: the versions are in `RELEASE_TOOLS`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """\
# The packages of constraints.txt with the sha256 of their wheels (Linux x86_64, Python 3.11), for .ci/env.
# Made by tools/hash_constraints.py.
"""
RELEASE_HEAD = """\
# The tools of the workflows release and audit, with the sha256 of their wheels (Linux x86_64, Python 3.11).
# Made by tools/hash_constraints.py --release.
"""
RELEASE_TOOLS = ("build==1.6.1", "cyclonedx-bom==7.5.0", "hatchling==1.33.0", "pip-audit==2.10.1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--wheel", type=Path, action="append", default=[], help="A wheel that is not on the index."
    )
    parser.add_argument("--release", action="store_true", help="Write constraints-release.txt instead.")
    options = parser.parse_args()
    if options.release:
        _write("constraints-release.txt", RELEASE_HEAD, _ask_pip())
        return
    hashes = _ask_index()
    for wheel in options.wheel:
        name, version = wheel.name.split("-")[:2]
        requirement = f"{name.lower().replace('_', '-')}=={version.partition('+')[0]}"
        hashes[requirement] = {hashlib.sha256(wheel.read_bytes()).hexdigest()}
    _write("constraints-hashes.txt", HEAD, hashes)


def _write(name: str, head: str, hashes: dict[str, set[str]]) -> None:
    lines = [
        f"{requirement} \\\n" + " \\\n".join(f"    --hash=sha256:{digest}" for digest in sorted(digests))
        for requirement, digests in sorted(hashes.items())
    ]
    (ROOT / name).write_text(head + "\n".join(lines) + "\n")
    print(f"wrote {name}: {len(hashes)} packages, {sum(map(len, hashes.values()))} hashes")


def _ask_index() -> dict[str, set[str]]:
    command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--system-certs", "--format", "pylock.toml"]
    platform = ["--python-version", "3.11.5", "--python-platform", "x86_64-manylinux_2_40"]
    result = subprocess.run([*command, *platform, ROOT / "constraints.txt"], check=True, capture_output=True)
    packages = tomllib.loads(result.stdout.decode())["packages"]
    return {f"{package['name']}=={package['version']}": _digests(package) for package in packages}


def _ask_pip() -> dict[str, set[str]]:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    variables["PIP_CONFIG_FILE"] = os.devnull  # no files and no index of this machine
    words = [*command, "--quiet", "--report", "-", *RELEASE_TOOLS]
    result = subprocess.run(words, env=variables, check=True, capture_output=True)
    return {
        f"{package['metadata']['name'].lower()}=={package['metadata']['version']}": {
            package["download_info"]["archive_info"]["hashes"]["sha256"]
        }
        for package in json.loads(result.stdout)["install"]
    }


def _digests(package: dict) -> set[str]:
    files = package.get("wheels") or [package["sdist"]]  # a package without a wheel is built from its source
    return {file["hashes"]["sha256"] for file in files}


if __name__ == "__main__":
    main()

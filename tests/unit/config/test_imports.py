"""Importing the configuration is fast, because it imports neither torch nor any other large package."""

import subprocess
import sys


def test_config_and_command_import_no_engine():
    code = (
        "import coordexp.config, coordexp.cli, sys;"
        "heavy = {'torch', 'transformers', 'vllm', 'numpy', 'PIL'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

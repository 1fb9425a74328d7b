"""Make a run whose checkpoints take long to finish: `python slow_save_worker.py CONFIG SECONDS`.

Only the delay is injected; the rest is the command itself.
"""

import sys
import time
from pathlib import Path

from coordexp.cli import main
from coordexp.train.stream import RowStream

if __name__ == "__main__":
    save = RowStream.save

    def save_slowly(stream: RowStream, folder: Path) -> None:
        time.sleep(float(sys.argv[2]))
        save(stream, folder)

    RowStream.save = save_slowly  # type: ignore[method-assign]
    main(["train", "--config", sys.argv[1]])

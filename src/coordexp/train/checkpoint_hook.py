"""Call a function of another package with every complete checkpoint, for example to upload it."""

from collections.abc import Callable
from pathlib import Path

from coordexp.errors import describe_exception
from coordexp.extensions import find_extensions, load_extension
from coordexp.tasks import Task, remind
from coordexp.train.callbacks import say

Hook = Callable[[Path], object]


class CheckpointHook:
    """Calls `hook` in a thread, while training goes on, one checkpoint after the other. An error of the hook is a
    warning.

    The checkpoint that the hook works on is the newest one until `start` has waited for it, so it is never one
    that `save_total_limit` removes."""

    def __init__(self, hook: Hook | None) -> None:
        self._hook = hook
        self._task: Task[object] | None = None
        self._checkpoint = Path()

    def start(self, checkpoint: Path) -> None:
        """Wait for the checkpoint before, and call the hook with this one."""
        self.close()
        if self._hook is not None:
            self._checkpoint, self._task = checkpoint, Task(self._hook, checkpoint)

    def close(self) -> None:
        """Wait for the hook, if it has not ended."""
        if self._task is None:
            return
        with remind(say, f"waiting for custom.on_checkpoint, which has {self._checkpoint}"):
            self._task.done.wait()
        if isinstance(error := self._task.error, Exception):
            say(f"warning: custom.on_checkpoint failed with {self._checkpoint}: {describe_exception(error)}")
        self._task = None


def load_hook(name: str | None) -> Hook | None:
    """Return the hook of this name, which the rules of settings have found to be there."""
    if name is None:
        return None
    hook: Hook = load_extension(find_extensions("checkpoint_hooks", taken=frozenset())[name])
    return hook

"""What people see beside results: messages, said by one process, and progress bars."""

from collections.abc import Iterable

import accelerate.logging
from accelerate.logging import MultiProcessAdapter
from tqdm.auto import tqdm


class OneVoice(MultiProcessAdapter):
    """Accelerate's logger of the first process, without its "[RANK 0]": no other process logs here."""

    def process(self, msg, kwargs):
        _, kwargs = super().process(msg, kwargs)
        return msg, kwargs


def get_logger(name: str) -> MultiProcessAdapter:
    """A logger that speaks on the first process alone; as Accelerate's it needs an `Accelerator`."""
    return OneVoice(accelerate.logging.get_logger(name).logger, {})


def progress_bar(items: Iterable, shown: bool, **settings) -> Iterable:
    """`items` under a progress bar where it is `shown`. tqdm heeds `TQDM_DISABLE` only where nobody says `disable`."""
    return tqdm(items, **settings) if shown else items

"""A kill at any moment of a save leaves a whole checkpoint, and the unfinished one is never taken for whole."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fsdp_v2.checkpoint.storage import is_complete
from tests.functional.core import checkpoint_kills as kills
from tests.harness.spawn import RankPool, RanksFailed

pytestmark = pytest.mark.filterwarnings("ignore:.*should have replaced")
KILLS = 24


def test_kills_at_random_moments(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    chance = random.Random(20)
    ranks(2).run(kills.save_until_killed, str(tmp_path), [], 0.0, 1)
    interrupted, moved_aside = 0, 0
    for index in range(KILLS):
        victims = [[0], [1], [0, 1]][index % 3]
        with pytest.raises(RanksFailed, match="SIGKILL"):
            ranks(2).run(kills.save_until_killed, str(tmp_path), victims, chance.uniform(0, 0.2), None, timeout=60)
        log = list(kills.read_log(tmp_path))
        ended = {(name, step) for what, name, step in log if what == "end"}
        interrupted += log[-1][0] == "begin"
        moved_aside += not is_complete(tmp_path / kills.SAME)
        last = max(step for name, step in ended if name == kills.SAME)
        assert kills.loaded_step(tmp_path / kills.SAME) in (last, last + 1)
        for folder in tmp_path.glob("step_*"):
            step = int(folder.name.removeprefix("step_"))
            if is_complete(folder):
                assert kills.loaded_step(folder) == step
                shutil.rmtree(folder)
            else:
                assert (folder.name, step) not in ended
    print(f"{interrupted} of {KILLS} kills during a save, {moved_aside} left the folder without a whole checkpoint")
    assert interrupted > KILLS // 2
    assert moved_aside > 0

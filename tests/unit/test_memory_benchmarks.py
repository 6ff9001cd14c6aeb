"""What the peak of a step is said to consist of, beside what is known of it. Nothing here is timed."""

import io

from rich.console import Console

from benchmarks import memory, memory_tables
from benchmarks.results import ACTIVATIONS, GATHERED, GRADIENTS, MEMORY_KINDS, OPTIMIZER, WEIGHTS

TINY = memory.Shape("tiny", (1, 8), {"hidden": 64, "layers": 3, "vocabulary": 128})


def peaks(rank, world_size):
    wanted = ("FSDP2", "v2 ZeRO-3", "v2 ZeRO-2", "FSDP2, no reshard")
    variants = [variant for variant in memory.SHARDED if variant.name in wanted]
    return memory.measure(lambda text: None, [TINY], variants)[0]


def test_bytes_at_the_peak_are_told_apart(ranks):
    result = ranks(2).run(peaks, timeout=200)[0]
    size = result.parameter_bytes
    theirs, mine, zero_2 = (result.of(name) for name in ("FSDP2", "v2 ZeRO-3", "v2 ZeRO-2"))
    near = 0.02 * size
    for figures, share in ((theirs, 0.5), (mine, 0.5), (zero_2, 1.0)):
        # The batch is at rest as well.
        assert abs(figures.kinds[WEIGHTS] - share * size) < near
        assert abs(figures.kinds[OPTIMIZER] - size) < near
        assert 0 < figures.kinds[GRADIENTS] <= 0.51 * size
        assert figures.kinds[ACTIVATIONS] < 0.5 * size
    # Rows and columns of the model: 12 hidden squared in a block, an embedding and an output layer in the root.
    assert mine.root == 4 * (2 * 128 * 64 + 2 * 64)
    assert mine.unit == mine.gradient
    assert mine.kinds[GATHERED] == mine.root + 2 * mine.unit
    assert zero_2.kinds[GATHERED] == 0
    assert mine.peak <= 1.01 * mine.needed(True)
    out = Console(width=250, file=io.StringIO(), record=True)
    out.print(memory_tables.kinds_table(result))
    out.print(memory_tables.units_table([result]))
    text = out.export_text()
    assert all(kind in text for kind in MEMORY_KINDS)
    assert f"{mine.peak / theirs.peak:.3f}" in text

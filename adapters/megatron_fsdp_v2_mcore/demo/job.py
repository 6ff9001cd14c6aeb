"""What one demo run is: its stock flags, its command line and its environment."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..bootstrap import ENV_CPU_EMULATION
from . import corpus

BATCH = 16

V2_FLAGS = ["--use-megatron-fsdp-v2", "--data-parallel-sharding-strategy", "optim_grads_params"]
BASELINE_FLAGS = ["--use-distributed-optimizer"]
# The fused kernels of apex and transformer-engine, which a plain installation doesn't have.
PLAIN_KERNELS = [
    *("--transformer-impl", "local"),
    *("--attention-backend", "unfused"),
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
]
MODEL = [
    *("--num-layers", "4"),
    *("--hidden-size", "256"),
    *("--num-attention-heads", "4"),
    *("--seq-length", "128"),
    *("--max-position-embeddings", "128"),
    *("--attention-dropout", "0"),
    *("--hidden-dropout", "0"),
]
SCHEDULE = [
    *("--train-iters", "300"),
    *("--lr", "1e-3"),
    *("--min-lr", "1e-4"),
    *("--lr-decay-style", "cosine"),
    *("--lr-warmup-fraction", "0.05"),
    *("--weight-decay", "0.1"),
    *("--clip-grad", "1.0"),
    *("--seed", "1234"),
    *("--log-interval", "1"),
    *("--eval-interval", "100000"),
    *("--eval-iters", "8"),
]


@dataclass(frozen=True)
class Job:
    """One run: who takes part, on what, and which stock flags the user added."""

    ranks: int
    on_gpu: bool
    baseline: bool
    stock_flags: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """``baseline`` (stock's DistributedOptimizer) or ``v2``."""
        return "baseline" if self.baseline else "v2"


def flags(job: Job, text: corpus.Corpus) -> list[str]:
    """Every stock flag of the run. The user's come last, so they win over ours."""
    micro_batch = max(1, BATCH // job.ranks)
    device = ["--distributed-backend", "nccl"] if job.on_gpu else ["--distributed-backend", "gloo"]
    data = [
        *("--train-data-path", str(text.train)),
        *("--valid-data-path", str(text.validation)),
        *("--data-cache-path", str(text.train.parent / "index-cache")),
        *("--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", str(corpus.VOCAB_SIZE)),
        *("--num-workers", "0"),
        "--no-create-attention-mask-in-dataloader",
    ]
    batch = ["--micro-batch-size", str(micro_batch), "--global-batch-size", str(micro_batch * job.ranks)]
    # Weights are drawn on the CPU everywhere, so that CPU and GPU runs start from the same ones.
    sharing = BASELINE_FLAGS if job.baseline else V2_FLAGS
    return [
        *(*device, "--use-cpu-initialization", *PLAIN_KERNELS, *data, *MODEL, *batch, *SCHEDULE, *sharing),
        *job.stock_flags,
    ]


def build_command(folder: Path) -> list[str]:
    """The command that writes the corpus below ``folder``. Megatron loads in that process, as in the ranks."""
    return [sys.executable, "-m", f"{__package__}.corpus", str(folder)]


def command(job: Job, text: corpus.Corpus, folder: Path, port: int) -> list[str]:
    """The torchrun command line; its ranks write logs and measurements below ``folder``."""
    script = Path(__file__).with_name("script.py")
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(job.ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", str(port)),
        *("--redirects", "3", "--log-dir", str(folder / "ranks")),
    ]
    measured = ["-m", f"{__package__}.measure", str(folder / "measured"), str(script)]
    return [*launcher, *measured, *flags(job, text)]


def environment(job: Job, loopback: str | None) -> dict[str, str]:
    """The environment of the launcher and its ranks. What the user has set stays."""
    chosen = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, _usable_cores() // job.ranks))}
    if loopback and not job.on_gpu:
        # gloo otherwise listens on the address of the host name, which a laptop or a container may not resolve.
        chosen["GLOO_SOCKET_IFNAME"] = loopback
    env = {**chosen, **os.environ}
    if not job.on_gpu:
        env[ENV_CPU_EMULATION] = "1"
    return env


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""``mfsdp2 train``: train a small GPT on real text and say what it cost."""

import importlib.util
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..demo.job import Job

INTERRUPTED = 130
NOTES = """\
State: the tensors alive between two steps, weighed on each rank (the heaviest is shown, padding included);
plain data parallel is parameters times bytes. Collectives: calls of this rank during the last step, over more than
one rank; coalesced calls count as one. They hold what the loop itself asks for, such as the mean of the loss."""


def train(
    context: typer.Context,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Train with stock's DistributedOptimizer instead, to compare.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes to train with. Default: one per GPU, or 2 on a CPU.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the text, the logs and the results.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port on which the ranks meet. 0: any free one.")] = 0,
) -> None:
    """Train a small GPT with stock Megatron and --use-megatron-fsdp-v2.

    It uses every GPU, or two CPU processes where there is none. The text is
    Python's own language reference, byte by byte. Any other argument is a
    stock Megatron flag and wins over the default:

    mfsdp2 train --train-iters 20 --data-parallel-sharding-strategy optim

    mfsdp2 train --baseline --train-iters 20

    At the end a table shows losses, pace, state per rank and collectives per
    step, beside the last run of the other kind with the same flags.
    Ctrl-C ends every process.
    """
    from rich.console import Console

    from ..demo import launch

    console = Console(soft_wrap=True)
    chosen_port = _choose_port(port)
    try:
        job = _plan(console, ranks, baseline, list(context.args))
        _train(console, job, output, chosen_port)
    except launch.RunFailed as failure:
        raise _end(str(failure)) from failure
    except OSError as error:
        raise _end(f"{error.filename or output}: {error.strerror}. --output names another folder.") from error
    except KeyboardInterrupt:
        console.print("Stopped. No process is left.")
        raise typer.Exit(INTERRUPTED) from None


def _choose_port(port: int) -> int:
    from ..demo import launch

    try:
        return launch.choose_port(port)
    except OSError as error:
        raise _end(f"--port {port}: {error.strerror}. 0 takes any free port.") from error


def _plan(console: "Console", ranks: int | None, baseline: bool, stock_flags: list[str]) -> "Job":
    if not (importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.training")):
        raise _end("megatron-core isn't installed: pip install 'megatron-fsdp-v2[mcore,cli]'")
    import torch

    from ..demo.job import Job

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and ranks and ranks > gpus:
        raise _end(f"--ranks {ranks}: there are {gpus} GPUs, and each rank needs one of its own.")
    job = Job(ranks=ranks or gpus or 2, on_gpu=bool(gpus), baseline=baseline, stock_flags=stock_flags)
    how = "stock DistributedOptimizer" if baseline else "--use-megatron-fsdp-v2"
    if gpus:
        console.print(f"{how} on {job.ranks} of {gpus} GPUs over nccl", highlight=False)
    else:
        console.print(f"{how} on {job.ranks} CPU processes over gloo; no GPU, so CUDA is emulated", highlight=False)
    return job


def _train(console: "Console", job: "Job", output: Path, port: int) -> None:
    from ..demo import corpus, launch, report
    from ..demo import job as jobs
    from ..demo.progress import ProgressLine, RunState

    output = output.resolve()
    folder = _new_folder(output, job.kind)
    env = jobs.environment(job, launch.loopback_interface())
    text = corpus.locate(output / "data")
    if not text.built:
        with console.status("writing the text as a Megatron dataset"):
            launch.run_quietly(jobs.build_command(output / "data"), env, folder / "corpus.log")
    console.print(
        f"text: {text.train_tokens:,} training and {text.validation_tokens:,} validation tokens; logs: {folder}",
        highlight=False,
    )
    state = RunState()
    with ProgressLine(console) as line:

        def on_line(printed: str) -> None:
            state.read(printed)
            line.show(state)

        launch.run(jobs.command(job, text, folder, port), env, folder, job.ranks, on_line)
    try:
        result = report.collect(job, state, folder)
    except ValueError as error:
        raise _end(f"The run ended, but there is nothing to compare: {error}. Logs: {folder}") from error
    console.print(report.table(result, report.latest_counterpart(result, output)))
    console.print(NOTES, style="dim", highlight=False)
    if not result.loss_fell:
        console.print("The loss did not fall.", style="yellow")
    other = "without --baseline" if job.baseline else "with --baseline (make train ARGS=--baseline)"
    console.print(f"To compare, run it once more {other} and the same flags.", highlight=False)


def _new_folder(output: Path, kind: str) -> Path:
    """A folder of its own for this run; two runs that start within a second get different ones."""
    started = datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        folder = output / f"{started}-{kind}{f'-{attempt}' if attempt else ''}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(17, "a hundred runs started in this second", str(output))


def _end(message: str) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(1)

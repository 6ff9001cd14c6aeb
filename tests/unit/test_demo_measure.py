"""The demo counts each collective once and weighs each storage once."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from megatron_fsdp_v2_mcore.demo import measure
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from tests.harness.spawn import RankPool


def count_known_collectives(rank: int, world_size: int) -> dict[str, int]:
    counter = measure.CollectiveCounter()
    counter.install(dist.ProcessGroup)
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    counter.counts.clear()

    part, whole = torch.ones(2), torch.empty(2 * world_size)
    dist.all_reduce(part)
    dist.all_reduce(part, async_op=True).wait()
    dist.all_gather_into_tensor(whole, part)
    dist.all_gather([torch.empty(2) for _ in range(world_size)], part)
    dist.reduce_scatter_tensor(part, whole)
    dist.broadcast(part, src=0)
    dist.barrier()
    with dist._coalescing_manager():
        for _ in range(3):
            dist.all_gather_into_tensor(torch.empty(2 * world_size), part)
    with dist._coalescing_manager():
        for _ in range(2):
            dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * world_size))
    dist.group.WORLD.allreduce([part]).wait()
    dist.all_reduce(part, group=alone)
    return dict(counter.counts)


def test_each_call_counts_once_and_coalesced_calls_as_one(ranks: Callable[[int], RankPool]) -> None:
    expected = {"all-reduce": 3, "all-gather": 3, "reduce-scatter": 2, "broadcast": 1, "barrier": 1}
    assert ranks(2).run(count_known_collectives) == [expected, expected]


class CoalescingGroup:
    """Records in place of a NCCL group, which coalesces between two calls."""

    def size(self) -> int:
        return 2

    def _start_coalescing(self, device: object) -> None: ...

    def _end_coalescing(self, device: object) -> None: ...

    def reduce_scatter(self, *args: object) -> None: ...


def test_calls_between_start_and_end_of_coalescing_count_as_one() -> None:
    counter = measure.CollectiveCounter()
    counter.install(CoalescingGroup)
    group = CoalescingGroup()
    group._start_coalescing(None)
    for _ in range(4):
        group.reduce_scatter()
    group._end_coalescing(None)
    group.reduce_scatter()
    assert counter.counts == Counter({"reduce-scatter": 2})


def weigh_a_sharded_model(rank: int, world_size: int) -> measure.RankMeasure:
    mesh = init_device_mesh("cpu", (world_size,))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    inner = torch.optim.Adam([weight], foreach=False)
    inner.step()
    recorder = measure.Recorder()
    model = torch.nn.Module()
    model.weight = weight
    recorder.model, recorder.optimizer = [model], Namespace(optimizer=inner)
    recorder.steps = [Counter({"all-gather": 7}), Counter({"all-gather": 2})]
    args = Namespace(params_dtype=torch.float32, optimizer="adam", accumulate_allreduce_grads_in_fp32=False)
    return recorder.measure(args)


def test_a_shard_weighs_what_this_rank_holds(ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(2).run(weigh_a_sharded_model):
        assert found.parameters == 24
        assert (found.weight_bytes, found.gradient_bytes) == (48, 48)
        assert found.optimizer_bytes == 96 + 4  # two moments and the step counter
        assert (found.plain_weight_bytes, found.plain_gradient_bytes, found.plain_optimizer_bytes) == (96, 96, 192)
        assert found.collectives_per_step == {"all-gather": 2}


def weigh_with_main_weights(rank: int, world_size: int, strategy: str) -> measure.RankMeasure:
    model = torch.nn.Linear(8, 8, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_params_dtype=torch.float32)
    fully_shard(model, strategy=strategy, mp_policy=policy)
    inner = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 8)).sum().backward()
    model.finish_grad_sync()
    inner.step()
    recorder = measure.Recorder()
    recorder.model, recorder.optimizer = [model], Namespace(optimizer=inner)
    args = Namespace(params_dtype=torch.bfloat16, optimizer="sgd", accumulate_allreduce_grads_in_fp32=True)
    return recorder.measure(args)


@pytest.mark.parametrize(("strategy", "weights"), [("optim_grads_params", 64), ("optim", 128)])
def test_weights_are_those_computed_with_and_main_weights_are_the_optimizers(
    ranks: Callable[[int], RankPool], strategy: str, weights: int
) -> None:
    for found in ranks(2).run(weigh_with_main_weights, strategy):
        assert found.weight_bytes == weights
        assert found.optimizer_bytes == 128 + 128  # half of 64 main weights and half of their momentum, fp32
        assert (found.plain_weight_bytes, found.plain_gradient_bytes, found.plain_optimizer_bytes) == (128, 256, 512)


def test_views_of_one_buffer_count_once_with_its_padding() -> None:
    buffer = torch.zeros(100)
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Parameter(buffer[:10]), torch.nn.Parameter(buffer[10:30].view(4, 5))
    model.a.main_grad = torch.zeros(10)
    main_weight = torch.nn.Parameter(torch.zeros(30, dtype=torch.float64))
    recorder = measure.Recorder()
    recorder.model = [model]
    inner = torch.optim.Adam([model.a, main_weight])
    recorder.optimizer = Namespace(chained_optimizers=[Namespace(optimizer=inner)])
    args = Namespace(params_dtype=torch.bfloat16, optimizer="muon", accumulate_allreduce_grads_in_fp32=True)
    found = recorder.measure(args)
    assert (found.weight_bytes, found.gradient_bytes, found.optimizer_bytes) == (400, 40, 240)
    assert (found.plain_weight_bytes, found.plain_gradient_bytes, found.plain_optimizer_bytes) == (60, 120, None)


def test_only_what_happens_inside_a_step_is_counted() -> None:
    recorder = measure.Recorder()
    model, optimizer = [torch.nn.Linear(1, 1)], object()

    def step() -> str:
        recorder.counter.counts["all-reduce"] += 2
        return "stepped"

    training = Namespace(setup_model_and_optimizer=lambda: (model, optimizer, None), train_step=step)
    recorder.install(training, counted_group=CoalescingGroup)
    assert training.setup_model_and_optimizer() == (model, optimizer, None)
    assert training.train_step() == "stepped"
    recorder.counter.counts["all-reduce"] += 10
    training.train_step()
    assert recorder.model is model
    assert recorder.optimizer is optimizer
    assert recorder.steps == [Counter({"all-reduce": 2}), Counter({"all-reduce": 2})]

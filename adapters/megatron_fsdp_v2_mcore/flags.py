"""What each stock flag means under `--use-megatron-fsdp-v2`: one table, which the checks and `docs/flags.md` follow.

A rule tells when a run asks for its flag (`given`), so that a refused flag becomes a line and a flag without effect a
warning. `docs/flags.md` holds what `render_tables()` returns; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .flag_combinations import CONTRADICTIONS, Given, tensor_parallel_ranks

Verdict = Literal["honoured", "no effect", "refused"]

NO_WEIGHT_SHARDS = "weights that are gathered over tensor-parallel ranks are not supported"
NO_PIPELINE = "pipeline parallelism is not supported yet"
NO_EXPERT_PARALLELISM = "expert parallelism is not supported yet"


@dataclass(frozen=True)
class FlagRule:
    """One stock flag. `note` completes the sentence "FLAG: ..." in messages and in the documentation."""

    flag: str
    verdict: Verdict
    note: str
    given: Given | None = None


def _on(dest: str) -> Given:
    return lambda args: bool(getattr(args, dest, None))


def _off(dest: str) -> Given:
    return lambda args: getattr(args, dest, True) is False


def _above_one(dest: str) -> Given:
    return lambda args: (getattr(args, dest, None) or 1) > 1


def _other_than(dest: str, *usual: object) -> Given:
    return lambda args: str(getattr(args, dest, usual[0])) not in {str(value) for value in usual}


def _honoured(flag: str, note: str) -> FlagRule:
    return FlagRule(flag, "honoured", note)


def _idle(flag: str, note: str, given: Given) -> FlagRule:
    return FlagRule(flag, "no effect", note, given)


def _refused(flag: str, note: str, given: Given) -> FlagRule:
    return FlagRule(flag, "refused", note, given)


_SHARDING = [
    _honoured("--use-megatron-fsdp", "implied; stock's own implementation is not used"),
    _honoured("--use-distributed-optimizer", "implied"),
    _honoured("--data-parallel-sharding-strategy", "no_shard, optim, optim_grads, optim_grads_params"),
    _honoured("--outer-dp-sharding-strategy", "no_shard or optim over the optimizer instances"),
    _honoured(
        "--num-distributed-optimizer-instances", "above 1 the data-parallel ranks form an outer and an inner axis"
    ),
    _honoured("--init-model-with-meta-device", "every unit is materialised, initialised and sharded in turn"),
    _honoured("--data-parallel-random-init", "replicated shards are broadcast from the first rank of their axis"),
    _idle(
        "--enable-full-sharding-in-hsdp",
        "stock does not read it either; use --outer-dp-sharding-strategy optim",
        _on("enable_full_sharding_in_hsdp"),
    ),
    _refused("--use-torch-fsdp2", "choose one of the two implementations", _on("use_torch_fsdp2")),
    _idle(
        "--torch-fsdp2-no-reshard-after-forward",
        "it belongs to --use-torch-fsdp2; use --data-parallel-sharding-strategy optim_grads",
        _off("torch_fsdp2_reshard_after_forward"),
    ),
    _refused("--tensor-parallel-num-weight-shards", NO_WEIGHT_SHARDS, _above_one("tensor_parallel_num_weight_shards")),
    _refused(
        "--expert-tensor-parallel-num-weight-shards",
        NO_WEIGHT_SHARDS,
        _above_one("expert_tensor_parallel_num_weight_shards"),
    ),
]

_PRECISION = [
    _honoured("--megatron-fsdp-main-params-dtype", "fp32, bf16, fp16; auto is the model's dtype"),
    _honoured(
        "--megatron-fsdp-main-grads-dtype",
        "fp32, bf16, fp16; auto is fp32 with --accumulate-allreduce-grads-in-fp32, else the dtype of the main weights",
    ),
    _honoured(
        "--megatron-fsdp-grad-comm-dtype",
        "fp32, bf16, fp16; auto is the main gradients' dtype where that was chosen, else the model's",
    ),
    _honoured("--accumulate-allreduce-grads-in-fp32", "main gradients are fp32 unless a dtype is named for them"),
    _honoured(
        "--grad-reduce-in-bf16",
        "leaves gradient communication in the model's dtype; accumulation stays in the main weights' dtype",
    ),
    _refused(
        "--main-params-dtype",
        "use --megatron-fsdp-main-params-dtype",
        _other_than("main_params_dtype", "fp32", "torch.float32"),
    ),
    _refused(
        "--main-grads-dtype",
        "use --megatron-fsdp-main-grads-dtype",
        _other_than("main_grads_dtype", "fp32", "torch.float32"),
    ),
    _refused(
        "--use-precision-aware-optimizer",
        "main weights and gradients belong to the sharded parameters; use the --megatron-fsdp-*-dtype flags",
        _on("use_precision_aware_optimizer"),
    ),
    _refused("--fp8-format", "low-precision weights are not supported yet", _on("fp8")),
    _refused("--fp4-format", "low-precision weights are not supported yet", _on("fp4")),
    _refused("--fp8-param-gather", "low-precision weights are not supported yet", _on("fp8_param_gather")),
    _refused("--fp4-param-gather", "low-precision weights are not supported yet", _on("fp4_param_gather")),
    _idle(
        "--keep-fp8-transpose-cache",
        "there are no low-precision weights",
        _on("keep_fp8_transpose_cache"),
    ),
    _idle(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "there are no low-precision weights",
        _on("reuse_grad_buf_for_mxfp8_param_ag"),
    ),
    _refused(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "use --megatron-fsdp-grad-comm-dtype",
        _on("ddp_reduce_scatter_with_fp32_accumulation"),
    ),
    _refused(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "use --megatron-fsdp-main-grads-dtype fp32",
        _on("ddp_param_name_patterns_for_fp32_local_accumulation"),
    ),
]

_COMMUNICATION = [
    _honoured("--overlap-grad-reduce", "gradients are reduced during the last micro-batch's backward, not after it"),
    _honoured(
        "--overlap-param-gather", "updated weights are gathered behind the optimizer step, not at their first use"
    ),
    _refused(
        "--overlap-param-gather-with-optimizer-step",
        "it needs interleaved pipeline parallelism, and " + NO_PIPELINE,
        _on("overlap_param_gather_with_optimizer_step"),
    ),
    _idle("--no-align-param-gather", "there is one pipeline stage", _off("align_param_gather")),
    _idle("--no-align-grad-reduce", "there is one pipeline stage", _off("align_grad_reduce")),
    _idle("--ddp-num-buckets", "a unit is a bucket; choose units with --fsdp-unit-modules", _on("ddp_num_buckets")),
    _idle("--ddp-bucket-size", "a unit is a bucket; choose units with --fsdp-unit-modules", _on("ddp_bucket_size")),
    _idle(
        "--ddp-pad-buckets-for-high-nccl-busbw",
        "rows are never padded for bandwidth",
        _on("ddp_pad_buckets_for_high_nccl_busbw"),
    ),
    _idle(
        "--ddp-average-in-collective",
        "gradients are averaged either way",
        _on("ddp_average_in_collective"),
    ),
    _idle(
        "--no-gradient-reduce-div-fusion",
        "gradients are averaged either way",
        _off("gradient_reduce_div_fusion"),
    ),
    _idle(
        "--suggested-communication-unit-size",
        "a unit is gathered and reduced as a whole",
        _on("suggested_communication_unit_size"),
    ),
    _idle("--create-all-gather-group", "gathers use the data-parallel group", _on("create_all_gather_group")),
    _idle(
        "--megatron-fsdp-enable-fine-grained-param-gather",
        "weights are gathered unit by unit; choose units with --fsdp-unit-modules",
        _on("megatron_fsdp_enable_fine_grained_param_gather"),
    ),
    _refused("--use-nccl-ub", "NCCL user buffers are not supported yet", _on("nccl_ub")),
    _idle("--disable-symmetric-registration", "it belongs to --use-nccl-ub", _on("disable_symmetric_registration")),
    _refused("--fsdp-manual-registration", "NCCL user buffers are not supported yet", _on("fsdp_manual_registration")),
    _refused("--fsdp-double-buffer", "a memory pool is not supported yet", _on("fsdp_double_buffer")),
    _refused(
        "--megatron-fsdp-max-pool-double-buffer",
        "a memory pool is not supported yet",
        _on("megatron_fsdp_max_pool_double_buffer"),
    ),
    _idle(
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        "it belongs to --fsdp-double-buffer",
        _on("fsdp_db_use_persist_buf_on_alloc_fail"),
    ),
    _refused("--delay-wgrad-compute", "delayed weight gradients are not supported yet", _on("delay_wgrad_compute")),
    _refused(
        "--overlap-dispatch-backward-with-experts-wgrad",
        "delayed weight gradients are not supported yet",
        _on("overlap_dispatch_backward_with_experts_wgrad"),
    ),
    _refused(
        "--overlap-moe-expert-parallel-comm",
        "the combined schedule is not supported yet",
        _on("overlap_moe_expert_parallel_comm"),
    ),
]

_TRAINING = [
    _honoured("--calculate-per-token-loss", "gradients are summed, then divided by the number of tokens"),
    _honoured("--clip-grad", "one norm over all shards"),
    _honoured(
        "--no-check-for-nan-in-loss-and-grad", "without it reduced gradients are checked, all ranks fail together"
    ),
    _honoured("--check-for-large-grads", "as the check for NaN"),
    _honoured("--log-params-norm", "norm of the main weights"),
    _honoured("--log-num-zeros-in-grad", "counted over all shards"),
    _honoured("--recompute-granularity", "full and selective"),
    _honoured("--no-gradient-accumulation-fusion", "implied: gradients come from autograd"),
    _refused("--optimizer", "only adam and sgd", _other_than("optimizer", "adam", "sgd")),
    _refused("--optimizer-cpu-offload", "offloading is not supported yet", _on("optimizer_cpu_offload")),
    _refused("--optimizer-cuda-graph", "CUDA graphs are not supported yet", _on("optimizer_cuda_graph")),
    _refused("--cuda-graph-impl", "CUDA graphs are not supported yet", _other_than("cuda_graph_impl", "none")),
    _refused("--enable-cuda-graph", "CUDA graphs are not supported yet", _on("enable_cuda_graph")),
    _refused("--external-cuda-graph", "CUDA graphs are not supported yet", _on("external_cuda_graph")),
    _refused(
        "--moe-single-grouped-weight", "grouped parameters can't be sharded by rows", _on("moe_single_grouped_weight")
    ),
    _refused(
        "--moe-single-grouped-bias", "grouped parameters can't be sharded by rows", _on("moe_single_grouped_bias")
    ),
    _refused("--qk-clip", "it writes whole weights in place", _on("qk_clip")),
    _refused("--freeze-all-layers", "there would be nothing to train", _on("freeze_all_layers")),
    _refused("--perform-rl-step", "reinforcement learning is not supported yet", _on("perform_rl_step")),
    _refused(
        "--check-weight-hash-across-dp-replicas-interval",
        "ranks hold different rows",
        _on("check_weight_hash_across_dp_replicas_interval"),
    ),
    _refused("--save-params-interval", "ranks hold different rows", _on("save_params_interval")),
    _refused("--save-wgrads-interval", "there are no whole gradients to save", _on("save_wgrads_interval")),
    _refused("--yaml-cfg", "it skips the checks of the command line", _on("yaml_cfg")),
]

_PARALLELISM = [
    _honoured(
        "--tensor-model-parallel-size", "parameters are the whole ones at rest, sharded over both kinds of ranks"
    ),
    _honoured("--sequence-parallel", "as stock"),
    _honoured("--context-parallel-size", "context-parallel ranks share shards as data-parallel ones do"),
    _refused(
        "--hybrid-context-parallel", "stock does not support it with sharded models", _on("hybrid_context_parallel")
    ),
    _refused("--pipeline-model-parallel-size", NO_PIPELINE, _above_one("pipeline_model_parallel_size")),
    _refused("--expert-model-parallel-size", NO_EXPERT_PARALLELISM, _above_one("expert_model_parallel_size")),
    _refused(
        "--expert-tensor-parallel-size",
        "it has to be the tensor-parallel size as long as expert parallelism is not supported",
        lambda args: (
            (getattr(args, "expert_tensor_parallel_size", None) or tensor_parallel_ranks(args))
            != tensor_parallel_ranks(args)
        ),
    ),
]

_CHECKPOINTS = [
    _honoured("--save", "in the format fsdp_dtensor; what the folder held stays until the new checkpoint is whole"),
    _honoured("--load", "a checkpoint of any number of ranks and strategy; it has to fit this model exactly"),
    _honoured("--pretrained-checkpoint", "as --load, and implies --finetune, where --load names no checkpoint"),
    _honoured("--finetune", "loads the weights alone"),
    _honoured("--no-save-optim", "saves no optimizer state and no schedule; load with --no-load-optim"),
    _honoured("--no-load-optim", "starts with a new optimizer"),
    _honoured("--no-load-rng", "keeps the random states of the start; so does a checkpoint saved with --no-save-rng"),
    _honoured("--exit-on-missing-checkpoint", "as stock"),
    _honoured("--ckpt-step", "the iteration to load; an error lists those that are complete"),
    _honoured("--save-retain-interval", "as stock"),
    _honoured("--use-checkpoint-args", "as stock"),
    _honoured("--no-strict-fsdp-dtensor-load", "keys that only one side has are listed and passed over"),
    _refused(
        "--ckpt-format",
        "fsdp_dtensor is the only format for sharded runs",
        _other_than("ckpt_format", "torch_dist", "fsdp_dtensor"),
    ),
    _refused("--async-save", "saves are synchronous so far", _on("async_save")),
    _refused(
        "--non-persistent-save-interval",
        "every checkpoint is kept; use --save-interval with --save-retain-interval",
        _on("non_persistent_save_interval"),
    ),
    _refused(
        "--non-persistent-ckpt-type",
        "every checkpoint is kept; use --save-interval with --save-retain-interval",
        _on("non_persistent_ckpt_type"),
    ),
    _refused("--ckpt-convert-format", "there is no other format to save in", _on("ckpt_convert_format")),
    _refused("--moe-use-upcycling", "upcycle in a run without v2, and load its checkpoint", _on("moe_use_upcycling")),
    _idle(
        "--load-main-params-from-ckpt",
        "the weights that are loaded are the main weights",
        _on("load_main_params_from_ckpt"),
    ),
    _idle(
        "--no-ckpt-load-validate-sharding-integrity",
        "what a rank holds is checked before every save and load",
        _off("ckpt_load_validate_sharding_integrity"),
    ),
    _idle(
        "--dist-ckpt-strictness",
        "use --no-strict-fsdp-dtensor-load",
        _other_than("dist_ckpt_strictness", "assume_ok_unexpected"),
    ),
    _idle(
        "--dist-ckpt-optim-fully-reshardable",
        "optimizer state is always saved by parameter",
        _on("dist_ckpt_optim_fully_reshardable"),
    ),
    _idle(
        "--distrib-optim-fully-reshardable-mem-efficient",
        "nothing is gathered for a save",
        _on("distrib_optim_fully_reshardable_mem_efficient"),
    ),
    _idle(
        "--ckpt-fully-parallel-load",
        "every rank reads its own shards",
        _on("ckpt_fully_parallel_load"),
    ),
    _idle(
        "--ckpt-assume-constant-structure",
        "a plan is made anew for every save",
        _on("ckpt_assume_constant_structure"),
    ),
    _idle("--verify-integrity", "files and sizes are checked always, contents never", _on("verify_integrity")),
]

SECTIONS: dict[str, list[FlagRule]] = {
    "Sharding": _SHARDING,
    "Precision": _PRECISION,
    "Communication and memory": _COMMUNICATION,
    "Training": _TRAINING,
    "Other parallelism": _PARALLELISM,
    "Checkpoints": _CHECKPOINTS,
}
RULES: tuple[FlagRule, ...] = tuple(rule for rules in SECTIONS.values() for rule in rules)


def render_tables() -> str:
    """The Markdown tables of `docs/flags.md`, one per section, and the refused combinations."""
    parts = []
    for title, rules in SECTIONS.items():
        rows = "\n".join(f"| `{rule.flag}` | {rule.verdict} | {rule.note} |" for rule in rules)
        parts.append(f"## {title}\n\n| flag | verdict | what happens |\n|---|---|---|\n{rows}")
    lines = "\n".join(f"- {contradiction.message}" for contradiction in CONTRADICTIONS)
    parts.append(f"## Combinations that are refused\n\n{lines}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(render_tables(), end="")

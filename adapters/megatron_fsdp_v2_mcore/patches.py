"""The one table of every place of megatron-core that this package touches, and how a row is applied and undone.

A row names its target, the signature it was written against and why it's needed; `mfsdp2 doctor` prints the table.
Nothing here imports Megatron: rows are applied after Megatron has imported the target module itself.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

V2: Literal["v2"] = "v2"
CPU: Literal["cpu-emulation"] = "cpu-emulation"
EXPLAIN: Literal["explain"] = "explain"
Mode = Literal["v2", "cpu-emulation", "explain"]

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One touched place.

    Attributes:
        module: dotted name of the Megatron module that holds the attribute.
        attribute: name inside the module, dotted for a method.
        kind: `wrap` replaces a function that callers look up late, `rebind` a name the module imported from
            elsewhere, `new-dispatch` sets `__new__` of a class so that it can return one of our subclasses.
        signature: parameters expected there (for `new-dispatch` those of `__init__`), as `signatures.signature_of`
            writes them: names and defaults, no annotations.
        reason: why the place has to be touched.
        implementation: `module:function` in this distribution. It takes the original; for `wrap` and `rebind` it
            returns the replacement, for `new-dispatch` it sets `__new__` on the class.
        modes: when the row is applied: when the run asked for v2, when it runs under CPU emulation, when it's only to
            be explained.
    """

    module: str
    attribute: str
    kind: Literal["wrap", "rebind", "new-dispatch"]
    signature: str
    reason: str
    implementation: str
    modes: tuple[Mode, ...] = (V2,)

    @property
    def target(self) -> str:
        return f"{self.module}.{self.attribute}"


PATCHES: tuple[Patch, ...] = (
    Patch(
        module="megatron.training.arguments",
        attribute="add_megatron_arguments",
        kind="wrap",
        signature="(parser)",
        reason="makes --use-megatron-fsdp-v2 and the flags beside it known; extra_args_provider belongs to the script",
        implementation="megatron_fsdp_v2_mcore.arguments:wrap_add_megatron_arguments",
    ),
    Patch(
        module="megatron.training.arguments",
        attribute="validate_args",
        kind="wrap",
        signature="(args, defaults={})",
        reason="turns the flag into stock settings before they are checked, and refuses contradictions",
        implementation="megatron_fsdp_v2_mcore.arguments:wrap_validate_args",
    ),
    Patch(
        module="megatron.training.training",
        attribute="get_megatron_ddp_config",
        kind="wrap",
        signature="(args)",
        reason="the data-parallel config has to say that v2 was asked for",
        implementation="megatron_fsdp_v2_mcore.config:wrap_get_megatron_ddp_config",
    ),
    Patch(
        module="megatron.core.distributed.fsdp.mcore_fsdp_adapter",
        attribute="FullyShardedDataParallel",
        kind="new-dispatch",
        signature="(self, config, ddp_config, module, fsdp_unit_modules=None, disable_bucketing=False, device=None, "
        "pg_collection=None)",
        reason="the model wrapper; a subclass passes every isinstance check and every import alias",
        implementation="megatron_fsdp_v2_mcore.wrapper:dispatch_fully_sharded_data_parallel",
    ),
    Patch(
        module="megatron.core.optimizer.distrib_optimizer",
        attribute="DistributedOptimizer",
        kind="new-dispatch",
        signature="(self, optimizer, config, grad_scaler, init_state_fn, model_chunks, per_model_buffers, "
        "data_parallel_group, data_parallel_group_gloo, data_parallel_group_idx, distributed_optimizer_instance_id)",
        reason="the optimizer wrapper steps main weights that stay sharded; stock code asks isinstance of this class",
        implementation="megatron_fsdp_v2_mcore.optimizer:dispatch_distributed_optimizer",
    ),
    Patch(
        module="megatron.training.training",
        attribute="save_checkpoint",
        kind="rebind",
        signature="(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, "
        "checkpointing_context=None, pipeline_rank=None, expert_rank=None, tensor_rank=None, "
        "pipeline_parallel=None, expert_parallel=None, non_persistent_ckpt=False, "
        "train_data_iterator=None, preprocess_common_state_dict_fn=None, release=False, "
        "tp_group=None, pp_group=None, dp_cp_group=None, dp_group=None, expt_dp_group=None, "
        "rng_state_key_prefix='')",
        reason="a folder's checkpoint stays until the new one is whole; errors say what is intact",
        implementation="megatron_fsdp_v2_mcore.checkpointing.saving:wrap_save_checkpoint",
    ),
    Patch(
        module="megatron.training.checkpointing",
        attribute="preprocess_fsdp_dtensor_state_dict",
        kind="wrap",
        signature="(args, raw_state_dict, model)",
        reason="stock's asks all ranks about every tensor, and splits only what its own buffers hold",
        implementation="megatron_fsdp_v2_mcore.checkpointing.saving:wrap_preprocess_state_dict",
    ),
    Patch(
        module="megatron.training.training",
        attribute="load_checkpoint",
        kind="rebind",
        signature="(ddp_model, optimizer, opt_param_scheduler, load_arg='load', strict=True, "
        "checkpointing_context=None, skip_load_to_model_and_opt=False, tp_group=None, "
        "pp_group=None, dp_cp_group=None, dp_group=None, expt_dp_group=None, "
        "rng_state_key_prefix='')",
        reason="the functions inside have to know model and optimizer to load into",
        implementation="megatron_fsdp_v2_mcore.checkpointing.loading:wrap_load_checkpoint",
    ),
    Patch(
        module="megatron.training.checkpointing",
        attribute="_load_base_checkpoint",
        kind="wrap",
        signature="(load_dir, args, rank0=False, sharded_state_dict=None, checkpointing_context=None, "
        "dp_cp_group=None, expt_dp_group=None, gpt_compat_layer_maps=None)",
        reason="loads in place and strictly, and finds what a kill left behind",
        implementation="megatron_fsdp_v2_mcore.checkpointing.loading:wrap_load_base_checkpoint",
    ),
    Patch(
        module="megatron.training.checkpointing",
        attribute="get_load_checkpoint_path_by_args",
        kind="wrap",
        signature="(args, load_arg='load')",
        reason="names the folder that v2 loads: of --pretrained-checkpoint, or moved aside by an unfinished save",
        implementation="megatron_fsdp_v2_mcore.checkpointing.loading:wrap_get_load_checkpoint_path",
    ),
    Patch(
        module="megatron.core.datasets.utils",
        attribute="compile_helpers",
        kind="wrap",
        signature="()",
        reason="the pip package carries the compiled helpers but no Makefile, so building them ends the run",
        implementation="megatron_fsdp_v2_mcore.datasets:wrap_compile_helpers",
        modes=(V2, CPU),
    ),
    Patch(
        module="megatron.core.transformer.moe.moe_utils",
        attribute="maybe_move_tensor_to_cpu",
        kind="wrap",
        signature="(tensor, as_numpy=False, record_stream=False)",
        reason="tensors that are on the CPU already are returned as tensors where callers need NumPy split sizes",
        implementation="megatron_fsdp_v2_mcore.cpu_megatron:wrap_maybe_move_tensor_to_cpu",
        modes=(CPU,),
    ),
    Patch(
        module="megatron.core.transformer.torch_norm",
        attribute="WrappedTorchNorm.__new__",
        kind="wrap",
        signature="(cls, config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
        "normalization='LayerNorm')",
        reason="torch's norms lack the marks of sequence parallelism, and those that have them need CUDA",
        implementation="megatron_fsdp_v2_mcore.cpu_megatron:wrap_torch_norm",
        modes=(CPU,),
    ),
    Patch(
        module="megatron.core.transformer.dot_product_attention",
        attribute="DotProductAttention",
        kind="new-dispatch",
        signature="(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, "
        "softmax_scale=None, cp_comm_type=None, pg_collection=None)",
        reason="the only attention for context parallelism is transformer-engine's, which needs CUDA",
        implementation="megatron_fsdp_v2_mcore.cpu_megatron:dispatch_dot_product_attention",
        modes=(CPU,),
    ),
    Patch(
        module="megatron.training.arguments",
        attribute="add_megatron_arguments",
        kind="wrap",
        signature="(parser)",
        reason="defaults that name GPU-only kernels and NCCL become their CPU counterparts",
        implementation="megatron_fsdp_v2_mcore.cpu_flags:wrap_add_megatron_arguments",
        modes=(CPU,),
    ),
    Patch(
        module="megatron.training.arguments",
        attribute="validate_args",
        kind="wrap",
        signature="(args, defaults={})",
        reason="refuses what can't run on the CPU before a kernel or a collective fails",
        implementation="megatron_fsdp_v2_mcore.cpu_flags:wrap_validate_args",
        modes=(CPU,),
    ),
    Patch(
        module="megatron.training.training",
        attribute="setup_model_and_optimizer",
        kind="wrap",
        signature="(model_type, model_provider_func=None, checkpointing_context=None, *, cfg_container=None, "
        "pg_collection=None)",
        reason="mfsdp2 explain ends the run where model and optimizer are as training would have them",
        implementation="megatron_fsdp_v2_mcore.explanation:wrap_setup_model_and_optimizer",
        modes=(EXPLAIN,),
    ),
)


def rows_for(modes: set[Mode], module: str | None = None) -> list[Patch]:
    """The rows that `modes` need, all of them or those of one Megatron module, in table order."""
    return [row for row in PATCHES if modes.intersection(row.modes) and (module is None or row.module == module)]


def apply(row: Patch, module: ModuleType) -> Callable[[], None]:
    """Apply one row to its imported module and return the function that undoes it."""
    owner: Any = module
    *path, name = row.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    implementation = _resolve(row.implementation)
    if row.kind == "new-dispatch":
        return _apply_new_dispatch(original, implementation)
    own_value = vars(owner).get(name, _ABSENT)
    setattr(owner, name, implementation(original))
    return lambda: _restore(owner, name, own_value)


def _apply_new_dispatch(cls: type, implementation: Callable[[type], Any]) -> Callable[[], None]:
    own_new = vars(cls).get("__new__", _ABSENT)
    implementation(cls)
    return lambda: _restore_new(cls, own_new)


def _restore_new(cls: type, own_new: object) -> None:
    _restore(cls, "__new__", own_new)
    # Once a class has had a `__new__` of its own, `object.__new__` refuses the constructor's arguments for good.
    inherited: object = cls.__new__
    if inherited is object.__new__:
        _restore(cls, "__new__", _new_without_arguments)


def _new_without_arguments(cls: type, *args: object, **keywords: object) -> object:
    return object.__new__(cls)


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _resolve(implementation: str) -> Callable[[Any], Any]:
    module_name, function_name = implementation.split(":")
    function: Callable[[Any], Any] = getattr(importlib.import_module(module_name), function_name)
    return function


def imported_module(name: str) -> ModuleType | None:
    """The module `name` if it has been imported completely, else None."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if module is None or getattr(spec, "_initializing", False) else module

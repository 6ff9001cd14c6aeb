"""Methods of FSDP2 that this design can't honour. They are here to say so."""

from __future__ import annotations

from typing import Any, NoReturn


class RefusedMethods:
    """Each raises ``NotImplementedError`` with its name, the value and the reason, unless the default is asked for."""

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Refused: gathers use flat buffers that outlive the call."""
        raise _not_ours(f"set_custom_all_gather(comm={comm!r})")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Refused: reductions use flat buffers that outlive the call."""
        raise _not_ours(f"set_custom_reduce_scatter(comm={comm!r})")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused if enabled."""
        if enable:
            raise _not_ours(f"set_allocate_memory_from_process_group_for_comm(enable={enable!r})")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Refused."""
        raise _not_ours(f"set_symm_mem_for_comm(backend={backend!r})")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Refused but for 1."""
        if max_input_buffers != 1:
            raise NotImplementedError(
                f"set_reduce_scatter_max_input_buffers(max_input_buffers={max_input_buffers!r}) can't be honoured: one "
                "unit's gradients are in flight at a time"
            )

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Refused if enabled."""
        if enable:
            raise NotImplementedError(
                f"set_separate_reduce_scatter_group(enable={enable!r}) can't be honoured: gathers and reductions along "
                "an axis use its one process group"
            )


def _not_ours(call: str) -> NotImplementedError:
    return NotImplementedError(
        f"{call} can't be honoured: collectives work on flat buffers whose memory the allocator of the root gives"
    )

"""What torch.compile has to know of the code that runs around a module's forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def keep_out_of_graphs(call: Callable[..., Any]) -> None:
    """Run this package, and ``call`` which enters it, as plain Python; the forwards it calls are compiled all the same.

    Frames that are skipped so cost nothing at run time, and end no graph: a module's own forward stays one.
    """
    import torch._dynamo.decorators as decorators
    import torch._dynamo.trace_rules as trace_rules

    package = __name__.split(".", maxsplit=1)[0]
    for part in ("runtime", "sharding", "memory"):
        trace_rules.add(f"{package}.{part}")
    decorators.skip(call)

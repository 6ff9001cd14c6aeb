"""Which modules of a model become units."""

from __future__ import annotations

import pytest
import torch
from megatron_fsdp_v2_mcore.meta_device import provide_initializers
from megatron_fsdp_v2_mcore.units import find_units, output_layer
from torch import nn


class TransformerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)


class CustomLayer(TransformerLayer):
    pass


class Around(nn.Module):
    """Like a multi-token-prediction layer: parameters of its own and a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(3, 3)
        self.inner = TransformerLayer()


class Model(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.share_embeddings_and_output_weights = shared
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([TransformerLayer(), CustomLayer()])
        self.around = Around()
        self.output_layer = nn.Identity() if shared else nn.Linear(3, 5)


def test_layers_and_their_subclasses_are_units_in_registration_order() -> None:
    model = Model(shared=True)
    assert find_units(model) == [model.layers[0], model.layers[1], model.around.inner]
    assert output_layer(model) is None


def test_untied_ends_are_units_too() -> None:
    model = Model(shared=False)
    assert find_units(model) == [
        model.embedding,
        model.layers[0],
        model.layers[1],
        model.around.inner,
        model.output_layer,
    ]
    assert output_layer(model) is model.output_layer


def test_a_model_that_says_nothing_of_sharing_keeps_its_ends_in_the_root() -> None:
    model = Model(shared=False)
    del model.share_embeddings_and_output_weights
    assert model.embedding not in find_units(model)


def test_names_and_paths_choose_other_classes_with_inner_ones_first() -> None:
    model = Model(shared=True)
    assert find_units(model, ["Around", "TransformerLayer"])[-2:] == [model.around.inner, model.around]
    assert find_units(model, [f"{CustomLayer.__module__}.CustomLayer"]) == [model.layers[1]]


def test_a_module_reached_twice_is_one_unit() -> None:
    model = Model(shared=True)
    model.again = model.layers[0]
    assert find_units(model).count(model.layers[0]) == 1


def test_a_name_without_a_module_is_named() -> None:
    with pytest.raises(ValueError, match="NoSuchLayer"):
        find_units(Model(shared=True), ["TransformerLayer", "NoSuchLayer"])


class _Config:
    @staticmethod
    def init_method(weight: torch.Tensor) -> None:
        weight.fill_(2.0)


class ColumnParallelLinear(nn.Module):
    """As Megatron's: no `reset_parameters`, the method that fills it stands in the configuration."""

    config = _Config()

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2, device=device))
        self.bias = nn.Parameter(torch.ones(2, device=device))


def test_parallel_layers_on_meta_get_an_initialiser_and_others_are_left_alone() -> None:
    meta, real, known = ColumnParallelLinear("meta"), ColumnParallelLinear("cpu"), nn.Linear(2, 2, device="meta")
    provide_initializers(nn.ModuleList([meta, real, known]))
    assert not hasattr(real, "reset_parameters")
    assert "reset_parameters" not in vars(known)
    meta.to_empty(device="cpu", recurse=False)
    meta.reset_parameters()  # type: ignore[operator]
    assert meta.weight.eq(2).all()
    assert meta.bias.eq(0).all()

import pytest
import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.reference import Transformer, build_model
from pseudoreal_trainer.model.rotary import rotary, rotate
from torch.nn import functional as F

TOKENS = torch.randint(256, (3, 13), generator=torch.Generator().manual_seed(1))


def _spec(layers: int = 6, activation: str = "GELU") -> Model:
    return Model.model_validate(
        {
            "layers": layers,
            "hiddenSize": 16,
            "attention": {"heads": 2},
            "sequenceLength": 12,
            "feedForward": {"size": 24, "activation": activation},
        }
    )


def _model(layers: int = 6, blocks: int = 2, pattern: str = "Cycle", activation: str = "GELU") -> Transformer:
    spec = _spec(layers, activation)
    return build_model(spec, Sharing.model_validate({"blocks": blocks, "pattern": pattern}), 5, torch.float64)


def _unshared_twin(model: Transformer) -> Transformer:
    twin = _model(len(model.layer_blocks), len(model.layer_blocks), activation="GELU" if _is_gelu(model) else "SwiGLU")
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("blocks.")}
    for layer, block in enumerate(model.layer_blocks):
        state |= {f"blocks.{layer}.{n}": value for n, value in model.blocks[block].state_dict().items()}
    twin.load_state_dict(state)
    return twin


def _is_gelu(model: Transformer) -> bool:
    return not any("gate" in name for name, _ in model.named_parameters())


def _backward(model: Transformer) -> torch.Tensor:
    logits: torch.Tensor = model(TOKENS[:, :-1])
    torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()))
    return logits


@pytest.mark.processor
@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize(("blocks", "pattern"), [(1, "Cycle"), (2, "Cycle"), (3, "Segment")])
def test_a_shared_gradient_is_the_sum_over_the_layers(blocks: int, pattern: str, activation: str) -> None:
    model = _model(6, blocks, pattern, activation)
    twin = _unshared_twin(model)
    assert torch.equal(_backward(model), _backward(twin))
    twin_gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    for block in range(blocks):
        for name, parameter in model.blocks[block].named_parameters():
            uses = [layer for layer, used in enumerate(model.layer_blocks) if used == block]
            total = torch.stack([twin_gradients[f"blocks.{layer}.{name}"] for layer in uses]).sum(0)
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 1e-6, "the gradient is not zero, so the comparison means something"
            torch.testing.assert_close(parameter.grad, total, rtol=1e-12, atol=1e-14)


@pytest.mark.processor
def test_no_position_sees_a_later_byte() -> None:
    model = _model()
    changed = TOKENS.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_rotary_products_depend_on_the_distance_alone() -> None:
    rotation = rotary(_spec(), 12, torch.zeros((), dtype=torch.float64))
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(8, generator=generator, dtype=torch.float64).expand(12, 8) for _ in range(2))
    rotated = [rotate(features[:, None], rotation).squeeze(1) for features in (query, key)]
    products = rotated[0] @ rotated[1].T
    for distance in range(12):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-12, atol=1e-12)
    assert len(set(products[:, 0].tolist())) == 12, "products at different distances differ"


def test_the_first_loss_is_near_that_of_guessing() -> None:
    logits = _model(8, 1)(TOKENS[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).item()
    assert abs(loss - torch.tensor(256.0).log().item()) < 1.0


@pytest.mark.processor
def test_the_same_seed_gives_the_same_weights() -> None:
    assert all(torch.equal(a, b) for a, b in zip(_model().parameters(), _model().parameters(), strict=True))

import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.sampling import generate, readable
from pseudoreal_trainer.model.transformer import build_model


def test_the_same_seed_writes_the_same_text_of_the_length_asked_for() -> None:
    spec = Model.model_validate(
        {"layers": 2, "hiddenSize": 8, "attention": {"heads": 1}, "sequenceLength": 8, "feedForward": {"size": 8}}
    )
    model = build_model(spec, Sharing(blocks=2), 0, torch.float32)
    texts = [generate(model, b"and it came to pass", 20, spec.sequence_length, seed) for seed in (1, 1, 2)]
    assert [len(text) for text in texts] == [20, 20, 20]
    assert texts[0] == texts[1] != texts[2]


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert readable(b"day.\n\x1b[2J\x07\xff") == "day.\n�[2J��"

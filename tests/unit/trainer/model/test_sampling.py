from collections import Counter
from math import log

import pytest
import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.reference import Transformer, build_model, generate
from pseudoreal_trainer.model.sampling import Sampling, readable

PROBABILITIES = {7: 0.5, 3: 0.25, 250: 0.15, 9: 0.1}


def test_the_same_seed_writes_the_same_tokens_as_many_as_asked_for() -> None:
    spec = Model.model_validate(
        {"layers": 2, "hiddenSize": 8, "attention": {"heads": 1}, "sequenceLength": 8, "feedForward": {"size": 8}}
    )
    model = build_model(spec, Sharing(blocks=2), 0, torch.float32)
    prompt = [*b"and it came to pass"]
    texts = [generate(model, prompt, 20, spec.sequence_length, Sampling(256, seed=seed)) for seed in (1, 1, 2)]
    assert [len(text) for text in texts] == [20, 20, 20]
    assert texts[0] == texts[1] != texts[2]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """Return a model with the same next-token probabilities after every prefix."""
    spec = Model.model_validate(
        {"layers": 1, "hiddenSize": 8, "attention": {"heads": 1}, "sequenceLength": 8, "feedForward": {"size": 8}}
    )
    model = build_model(spec, Sharing(blocks=1), 0, torch.float32)
    logits = torch.full((256,), -1000.0)
    for token, probability in PROBABILITIES.items():
        logits[token] = log(probability)
    monkeypatch.setattr(model, "forward", lambda tokens: logits.expand(1, tokens.shape[1], 256))
    return model


def drawn(model: Transformer, sampling: Sampling) -> Counter[int]:
    return Counter(generate(model, [1], 2000, 8, sampling))


def test_tokens_are_drawn_by_their_probabilities(known: Transformer) -> None:
    found = drawn(known, Sampling(256, temperature=1.0))
    for token, probability in PROBABILITIES.items():
        # Four standard deviations.
        assert abs(found[token] / 2000 - probability) < 4 * (probability * (1 - probability) / 2000) ** 0.5


def test_a_lower_temperature_prefers_what_is_probable(known: Transformer) -> None:
    squares = sum(probability**2 for probability in PROBABILITIES.values())
    found = drawn(known, Sampling(256, temperature=0.5))
    assert abs(found[7] / 2000 - 0.25 / squares) < 0.045
    assert drawn(known, Sampling(256, temperature=0)) == {7: 2000}


@pytest.mark.parametrize(
    ("top_p", "tokens"), [(0.4, {7}), (0.5, {7}), (0.6, {7, 3}), (0.76, {7, 3, 250}), (1.0, {7, 3, 250, 9})]
)
def test_only_the_nucleus_is_drawn(known: Transformer, top_p: float, tokens: set[int]) -> None:
    assert drawn(known, Sampling(256, temperature=1.0, top_p=top_p)).keys() == tokens


def test_rows_that_are_no_tokens_are_never_drawn(known: Transformer) -> None:
    assert drawn(known, Sampling(200, temperature=1.0)).keys() == {7, 3, 9}


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert readable("day.\n\x1b[2J\x07\ufffd") == "day.\n\ufffd[2J\ufffd\ufffd"

"""Sequence length on which published weights were trained."""

from typing import Any

import pytest
from pseudoreal_trainer.convert.published_config import KINDS, trained_length

YARN, ORIGINAL = {"type": "yarn", "factor": 4.0}, {"original_max_position_embeddings": 32_768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": None}, 2048),
        ({}, 2048),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 4096),
        # Qwen 3 as published, with the YaRN scaling that its model card recommends for 131,072 tokens.
        ({"max_position_embeddings": 40_960, "rope_scaling": YARN | ORIGINAL}, 131_072),
        ({"max_position_embeddings": 32_768, "rope_scaling": YARN}, 131_072),
        # Llama 3.1 as published: it was trained on longer sequences than its factor extends to.
        ({"max_position_embeddings": 131_072, "rope_parameters": LLAMA3}, 131_072),
    ],
)
def test_the_length_that_weights_were_trained_on(entries: dict[str, Any], expected: int) -> None:
    assert trained_length({"model_type": "llama", **entries}) == expected


def test_a_config_without_a_length_means_that_of_its_class() -> None:
    from transformers import AutoConfig

    for kind in KINDS:
        theirs = AutoConfig.for_model(kind)
        assert trained_length({"model_type": kind}) == theirs.max_position_embeddings, kind

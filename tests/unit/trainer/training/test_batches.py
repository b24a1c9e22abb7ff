"""Token ids of every integer dtype reach the engine unchanged."""

import numpy as np
import pytest
import torch
from pseudoreal_trainer.training.data_source import WindowBatch


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.int32, np.int64])
def test_token_ids_keep_their_values_in_a_batch(kind: type) -> None:
    largest = min(np.iinfo(kind).max, 2**31 - 1)
    batch = WindowBatch([np.array([0, 200, largest], dtype=kind)])
    assert batch.shape(0) == (1, 2)
    assert torch.equal(batch.tokens(0), torch.tensor([[0, 200, largest]]))

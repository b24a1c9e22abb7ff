"""The two files of a rank: weights and moments."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from pseudoreal_trainer.checkpoint.manifest import MOMENTS_FILE, WEIGHTS_FILE, FileDigest, entry_name
from pseudoreal_trainer.checkpoint.tensor_file import Form, TensorWriter
from pseudoreal_trainer.plan.parts import Part
from pseudoreal_trainer.plan.units import MOMENTS, Kind, is_hidden_matrix
from pseudoreal_trainer.storage.path import StoragePath


class RankWriter:
    """Writer of a rank's part of each unit. Order: unit by unit; for each unit the weights, then the first moments,
    then the second moments."""

    def __init__(
        self,
        folder: StoragePath,
        rank: int,
        units: Sequence[Sequence[Part]],
        dtype: str,
        moment_dtype: str | None = None,
        *,
        uses_muon: bool = False,
    ) -> None:
        """`units`: the parts of each unit, in the order of writing. `moment_dtype`: dtype of the moments; None: the
        same as of the weights. `uses_muon`: whether matrices in blocks have no second moment."""
        self._names = (WEIGHTS_FILE.format(rank), MOMENTS_FILE.format(rank))
        parts_of = Counter(part.name for parts in units for part in parts)

        def forms(parts: Sequence[Part], kind: Kind) -> dict[str, Form]:
            return {
                entry_name(part.name, kind, part.begin, is_alone=parts_of[part.name] == 1): Form(
                    part.stored_shape, dtype if kind == "weights" else moment_dtype or dtype
                )
                for part in parts
                if not (uses_muon and kind == "second_moment" and is_hidden_matrix(part.name))
            }

        weights = dict(chain.from_iterable(forms(parts, "weights").items() for parts in units))
        moments = dict(chain.from_iterable(forms(parts, kind).items() for parts in units for kind in MOMENTS))
        self._weights = TensorWriter(folder / self._names[0], weights)
        self._moments = TensorWriter(folder / self._names[1], moments)

    def write(self, kind: Kind, content: Any) -> None:
        """Append a buffer with the next elements of this kind."""
        (self._weights if kind == "weights" else self._moments).append(content)

    def finish(self) -> dict[str, FileDigest]:
        """Finish both files; return file name -> digest. Their content then survives a crash of the machine (see
        `Output.finish`)."""
        return dict(zip(self._names, (self._weights.finish(), self._moments.finish()), strict=True))

    def close(self) -> None:
        """Close both files. See `Output.close` for files that were not finished."""
        self._weights.close()
        self._moments.close()

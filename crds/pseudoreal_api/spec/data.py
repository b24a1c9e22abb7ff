"""The text that is learned, and how it becomes tokens."""

from typing import Any, Literal

from pydantic import Field

from pseudoreal_api.base import VOLUME_SOURCE, ApiModel, DecimalString


class Validation(ApiModel):
    fraction: DecimalString = Field(
        "0.02", description="fraction is the share of the corpus, at its end, that is kept for validation."
    )
    every_steps: int = Field(
        100,
        ge=1,
        le=1_000_000_000,
        description="everySteps is the number of training steps between two measurements of the validation loss.",
    )
    sequences: int = Field(
        64,
        ge=1,
        le=1_000_000,
        description="sequences is the largest number of sequences that are measured; they are spread evenly over"
        " the validation text.",
    )


class Tokenizer(ApiModel):
    type: Literal["Bytes"] = Field("Bytes", description="type is the kind of the tokenizer. Bytes: one token a byte.")


class Data(ApiModel):
    path: str = Field(
        min_length=1,
        max_length=4096,
        description="path is the folder of the corpus in the trainer pod. A relative path means the trainer"
        " image's working directory; under `pseudoreal run` it means the folder of the job file.",
    )
    pattern: str = Field(
        "**/*.txt",
        min_length=1,
        max_length=256,
        description="pattern is a glob pattern, relative to path, that the files of the corpus match.",
    )
    tokenizer: Tokenizer = Field(Tokenizer(), description="tokenizer turns text into tokens.")
    validation: Validation = Field(Validation(), description="validation says how the validation loss is measured.")
    seed: int = Field(
        0, ge=0, le=2**31, description="seed determines the order of the samples and the initial weights."
    )
    volume: dict[str, Any] | None = Field(
        None,
        description="volume is a Kubernetes volume source (for instance persistentVolumeClaim) that is mounted"
        " read-only at path, which must then be absolute. Omitted: the corpus is part of the image.",
        json_schema_extra=VOLUME_SOURCE,
    )

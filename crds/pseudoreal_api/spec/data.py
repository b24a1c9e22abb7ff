"""Training text, and its tokenization."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pseudoreal_api.base import ATOMIC, ApiModel, DecimalString, DnsLabel, list_map
from pseudoreal_api.spec.kubernetes import VOLUME_SOURCE
from pseudoreal_api.wire.contract import Since


class TokenFiles(ApiModel):
    """Files of tokens, by a name of their own."""

    name: DnsLabel = Field(description="name tells these files from the others, in metrics and in phases[].mixture.")
    path: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="path is the folder of the files, below data.path, or a URL: s3://, gs:// or az://. Omitted: it is"
        " the name.",
    )
    format: Literal["Native", "Megatron", "Nanotron", "NumPy", "Raw"] = Field(
        "Native",
        description="format is the kind of the files. Native: what `pseudoreal data prepare` writes. Megatron: .bin"
        " beside .idx. Nanotron: .ds. NumPy: .npy with a header. Raw: numbers alone, of the type dtype.",
    )
    pattern: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="pattern is a glob pattern, relative to path, that the files match. Omitted: all of the format's"
        " usual suffix. Native files are named by their index.",
    )
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = Field(
        "uint16", description="dtype is the type of the numbers in files of the format Raw."
    )


class Source(TokenFiles):
    weight: int = Field(
        1,
        ge=1,
        le=100_000,
        description="weight is the source's part of the samples, beside the weights of the other sources.",
    )
    max_epochs: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="maxEpochs is the number of times that the source may be read; a job that would read it more often"
        " is refused when it starts. Omitted: there is no bound.",
    )


Prompt = Annotated[str, Field(min_length=1, max_length=1024)]


class Samples(ApiModel):
    """Prompts for generated samples at validations during training."""

    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=16)] = Field(
        description="prompts are the texts that the model goes on from, each by itself.", json_schema_extra=ATOMIC
    )
    tokens: int = Field(
        32,
        ge=1,
        le=1024,
        description="tokens is the number of tokens that are written behind each prompt. Each one costs as much as the"
        " validation loss of one sequence for every prompt.",
    )
    seed: int = Field(0, ge=0, le=2**31, description="seed determines which of the probable tokens are written.")


class Validation(ApiModel):
    fraction: DecimalString = Field(
        "0.02",
        description="fraction is the share of the text, at its end, that is kept for validation. It has no meaning"
        " beside sources.",
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
        description="sequences is the largest number of sequences of each set that are measured; they are spread"
        " evenly over it.",
    )
    sets: Annotated[list[TokenFiles], Field(max_length=16)] = Field(
        [],
        description="sets are files of tokens that validation losses are measured on, one after the other. The loss of"
        " the first one is the job's. They stand beside sources.",
        json_schema_extra=list_map("name"),
    )
    samples: Samples | None = Field(
        None,
        description="samples are written at each validation, and stand beside its loss in metrics.jsonl. Omitted: none"
        " are.",
    )


class Tokenizer(ApiModel):
    type: Literal["Bytes", "File"] = Field(
        "Bytes",
        description="type is the kind of the tokenizer. Bytes: one token a byte. File: a tokenizer.json, with which"
        " sources were prepared.",
    )
    path: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="path is the tokenizer.json of the type File, or its folder, below data.path. Omitted with Bytes.",
    )


class Documents(ApiModel):
    masking: Literal["None", "IntraDocument"] = Field(
        "None",
        description="masking says what tokens attend to. None: to all earlier ones of the sequence. IntraDocument: to"
        " those of their own document, in which positions begin at 0; no loss is counted for the first token of a"
        " document. It needs sources.",
    )
    end_token: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="endToken is the token that ends documents, for files that do not say which one does. Omitted: that"
        " of tokenizer. It has no meaning without masking.",
    )


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
        description="pattern is a glob pattern, relative to path, that the files of the corpus match. It has no meaning"
        " beside sources.",
    )
    sources: Annotated[list[Source], Field(max_length=32), Since(4)] = Field(
        [],
        description="sources are files of tokens that training reads in a mixture, instead of text below path.",
        json_schema_extra=list_map("name"),
    )
    tokenizer: Tokenizer = Field(Tokenizer(), description="tokenizer turns text into tokens.")
    documents: Annotated[Documents, Since(4)] = Field(
        Documents(), description="documents says what training makes of the documents in a sequence."
    )
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

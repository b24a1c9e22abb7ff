"""Training text, and its tokenization."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pseudoreal_api.base import ATOMIC, ApiModel, DecimalString, DnsLabel, list_map
from pseudoreal_api.spec.kubernetes import VOLUME_SOURCE
from pseudoreal_api.wire.contract import Since


class TokenFiles(ApiModel):
    """Files of tokens, by a name of their own."""

    name: DnsLabel = Field(
        description="name is the name of these files, unique in the list. It labels their losses and shares in"
        " metrics; phases[].mixture refers to sources by it."
    )
    path: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="path is the folder of the token files, relative to data.path, or a URL that starts with s3://,"
        " gs:// or az://. Omitted: a folder called like name.",
    )
    format: Literal["Native", "Megatron", "Nanotron", "NumPy", "Raw"] = Field(
        "Native",
        description="format is the file format of the tokens. Native: written by `pseudoreal data prepare`."
        " Megatron: pairs of .bin and .idx. Nanotron: .ds. NumPy: .npy with its header. Raw: binary integers of"
        " type dtype, without a header.",
    )
    pattern: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="pattern is a glob pattern, relative to path, that selects token files. Omitted: all files with"
        " the usual suffix of the format. It does not apply to format Native, whose index lists the files.",
    )
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = Field(
        "uint16",
        description="dtype is the integer type of a token in files of format Raw. Other formats state it themselves.",
    )


class Source(TokenFiles):
    weight: int = Field(
        1,
        ge=1,
        le=100_000,
        description="weight is the source's share of the training samples, relative to the weights of the other"
        " sources: with weights 3 and 1, three of four samples come from the first. phases[].mixture overrides it"
        " for a phase.",
    )
    max_epochs: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="maxEpochs is the maximum number of times that training may read the source. A job that would"
        " read it more often is refused when it starts. Omitted: training may repeat the source any number of"
        " times.",
    )


Prompt = Annotated[str, Field(min_length=1, max_length=1024)]


class Samples(ApiModel):
    """Prompts for generated samples at validations during training."""

    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=16)] = Field(
        description="prompts are texts that the model continues at each validation, one sample of text per prompt.",
        json_schema_extra=ATOMIC,
    )
    tokens: int = Field(
        32,
        ge=1,
        le=1024,
        description="tokens is the number of tokens generated after each prompt. Generating one token for all"
        " prompts costs about as much as one validation sequence per prompt.",
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**31,
        description="seed is the seed of the random choice of generated tokens. With the same seed and weights,"
        " samples are the same.",
    )


class Validation(ApiModel):
    fraction: DecimalString = Field(
        "0.02",
        description="fraction is the share of the text, taken from its end, that is held out for validation. It"
        " applies only to text: with data.sources, set validation.sets instead.",
    )
    every_steps: int = Field(
        100,
        ge=1,
        le=1_000_000_000,
        description="everySteps is the number of training steps between two measurements of the validation loss."
        " The loss is also measured at the start and the end of each phase.",
    )
    sequences: int = Field(
        64,
        ge=1,
        le=1_000_000,
        description="sequences is the maximum number of sequences per validation set that a measurement reads. They"
        " are evenly spaced over the set and the same every time.",
    )
    sets: Annotated[list[TokenFiles], Field(max_length=16)] = Field(
        [],
        description="sets are files of tokens on which validation losses are measured, one after the other. The"
        " loss on the first set is the job's validation loss: status and until.validationLoss use it. They need"
        " data.sources. The default is no set.",
        json_schema_extra=list_map("name"),
    )
    samples: Samples | None = Field(
        None,
        description="samples configures texts that the model generates at each validation; they are written to"
        " metrics.jsonl. Omitted: no text is generated.",
    )


class Tokenizer(ApiModel):
    type: Literal["Bytes", "File"] = Field(
        "Bytes",
        description="type is the kind of tokenizer. Bytes: each byte of the text is a token. File: a"
        " tokenizer.json, with which data.sources were prepared.",
    )
    path: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="path is the tokenizer.json, or the folder that contains it, relative to data.path. Set it with"
        " type File. Omitted with type Bytes.",
    )


class Documents(ApiModel):
    masking: Literal["None", "IntraDocument"] = Field(
        "None",
        description="masking says to which earlier tokens a token attends if a sequence contains several documents."
        " None: to all earlier tokens of the sequence. IntraDocument: to earlier tokens of its own document only."
        " Positions then start at 0 in each document, and the first token of a document has no loss. IntraDocument"
        " needs data.sources.",
    )
    end_token: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="endToken is the id of the token that ends a document. Set it for masking IntraDocument if the"
        " token files do not name this token. Omitted: the end token of the tokenizer.",
    )


class Data(ApiModel):
    path: str = Field(
        min_length=1,
        max_length=4096,
        description="path is the folder of the training data in the trainer pod. A relative path is relative to the"
        " working directory of the trainer image, or, in `pseudoreal run`, to the folder of the job file.",
    )
    pattern: str = Field(
        "**/*.txt",
        min_length=1,
        max_length=256,
        description="pattern is a glob pattern, relative to path, that selects the text files of the corpus. It is"
        " not used with sources.",
    )
    sources: Annotated[list[Source], Field(max_length=32), Since(4)] = Field(
        [],
        description="sources are sets of token files that training reads as a mixture. The default, no source,"
        " trains on the text files below path, as bytes.",
        json_schema_extra=list_map("name"),
    )
    tokenizer: Tokenizer = Field(
        Tokenizer(), description="tokenizer says how text becomes tokens. The default takes each byte as a token."
    )
    documents: Annotated[Documents, Since(4)] = Field(
        Documents(),
        description="documents says how training treats the boundaries between documents within a sequence. The"
        " default ignores them.",
    )
    validation: Validation = Field(
        Validation(),
        description="validation says on which data, how often, and on how many sequences the validation loss is"
        " measured.",
    )
    seed: int = Field(
        0, ge=0, le=2**31, description="seed is the seed of the order of training samples and of the initial weights."
    )
    volume: dict[str, Any] | None = Field(
        None,
        description="volume is a Kubernetes volume source (for instance persistentVolumeClaim) that is mounted"
        " read-only at path; path must then be absolute. Omitted: the data is in the trainer image, or sources are"
        " URLs.",
        json_schema_extra=VOLUME_SOURCE,
    )

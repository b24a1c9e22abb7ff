"""Rules on the data: validation, token sets, tokenizer."""

from pseudoreal_api.spec.rules.rule import on_job

DATA_RULES = (
    on_job(
        "double(self.data.validation.fraction) > 0.0 && double(self.data.validation.fraction) < 1.0",
        "spec.data.validation.fraction %s must lie between 0 and 1, both excluded",
        "self.data.validation.fraction",
    ),
    on_job(
        "size(self.data.sources) == 0 || size(self.data.validation.sets) > 0",
        "spec.data.validation.sets: beside the %d spec.data.sources there must be one at least; name files of tokens"
        " that are not trained on",
        "size(self.data.sources)",
    ),
    on_job(
        "size(self.data.sources) > 0 || size(self.data.validation.sets) == 0",
        "spec.data.validation.sets: the %d sets are tokens, and without spec.data.sources training reads text; remove"
        " them, and spec.data.validation.fraction of the text is measured",
        "size(self.data.validation.sets)",
    ),
    on_job(
        "has(self.data.tokenizer.path) == (self.data.tokenizer.type == 'File')",
        "spec.data.tokenizer.type is %s: File needs spec.data.tokenizer.path, and Bytes has none",
        "self.data.tokenizer.type",
    ),
    on_job(
        "self.data.tokenizer.type == 'Bytes' || size(self.data.sources) > 0",
        "spec.data.tokenizer.type %s is for spec.data.sources, and text is trained on as bytes; run `pseudoreal data"
        " prepare` with that tokenizer, and name what it writes in spec.data.sources",
        "self.data.tokenizer.type",
    ),
)

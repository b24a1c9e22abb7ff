"""Rules on tokens: vocabulary size, document-end token, bound of the logits."""

from pseudoreal_api.spec.rules.rule import on_job

_BYTES = 256
"""Vocabulary size of the tokenizer Bytes."""

VOCABULARY_RULES = (
    on_job(
        f"size(self.data.sources) > 0 || self.model.vocabularySize >= {_BYTES}",
        f"spec.model.vocabularySize %d must be at least {_BYTES}: text is trained on as bytes",
        "self.model.vocabularySize",
    ),
    on_job(
        "self.data.documents.masking == 'None' || size(self.data.sources) > 0",
        "spec.data.documents.masking %s needs spec.data.sources: in text that is trained on as bytes nothing ends a"
        " document",
        "self.data.documents.masking",
    ),
    on_job(
        "!has(self.data.documents.endToken) || self.data.documents.endToken < self.model.vocabularySize",
        "spec.data.documents.endToken %d must be below spec.model.vocabularySize %d",
        "self.data.documents.endToken",
        "self.model.vocabularySize",
    ),
    on_job(
        "!has(self.model.logitSoftCap) || double(self.model.logitSoftCap) > 0.0",
        "spec.model.logitSoftCap %s must be greater than 0; leave it out for logits without a bound",
        "self.model.logitSoftCap",
    ),
)

"""Rotary positions in config.json: `rope_parameters` of `transformers` 5, `rope_theta` and `rope_scaling` of version 4.
If only one form is present, the other version silently uses its defaults, so both are written and both are read."""

from typing import Any

from pseudoreal_api.spec.model import Rotary

from pseudoreal_trainer.convert.config_entries import ConfigEntries
from pseudoreal_trainer.errors import UnfitWeights

Json = dict[str, Any]

_KINDS = {"default": None, "llama3": "Llama3", "yarn": "Yarn"}
_YARN: Json = {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "truncate": True}
"""Defaults of `transformers` for missing yarn entries."""


def rotary_entries(spec: Rotary) -> Json:
    """Return the rotary entries of config.json, in the forms of `transformers` 4 and 5."""
    parameters = rotary_parameters(spec)
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    older = {"rope_theta": parameters["rope_theta"]} | ({} if spec.scaling is None else {"rope_scaling": scaling})
    return {**older, "rope_parameters": parameters}


def rotary_parameters(spec: Rotary) -> Json:
    """Return the entry `rope_parameters`."""
    base: Json = {"rope_theta": float(spec.base)}
    if spec.scaling is None:
        return {"rope_type": "default", **base}
    if (llama3 := spec.scaling.llama3) is not None:
        return base | {
            "rope_type": "llama3",
            "factor": float(llama3.factor),
            "low_freq_factor": float(llama3.low_frequency_factor),
            "high_freq_factor": float(llama3.high_frequency_factor),
            "original_max_position_embeddings": llama3.original_sequence_length,
        }
    yarn = spec.scaling.yarn
    assert yarn is not None, "a scaling has the parameters of its type"
    factor = {} if yarn.attention_factor is None else {"attention_factor": float(yarn.attention_factor)}
    return (
        base
        | factor
        | {
            "rope_type": "yarn",
            "factor": float(yarn.factor),
            "beta_fast": float(yarn.beta_fast),
            "beta_slow": float(yarn.beta_slow),
            "original_max_position_embeddings": yarn.original_sequence_length,
        }
    )


def rotary_facts(parameters: Json) -> Json:
    """Return the meaning of `rope_parameters`: field of spec.model -> value. Raises UnfitWeights if a parameter is not
    supported."""
    entries = ConfigEntries(parameters, "rope_parameters.")
    kind = entries.get("rope_type", "default")
    if kind not in _KINDS:
        raise UnfitWeights(f"rope_parameters.rope_type is {kind}; those that are computed are {', '.join(_KINDS)}")
    facts = {"attention.rotary.base": entries.number("rope_theta"), "attention.rotary.scaling.type": _KINDS[kind]}
    if kind != "default":
        facts |= _factors(entries, kind)
    if unknown := entries.unread():
        raise UnfitWeights(f"rope_parameters has {', '.join(unknown)}, which a rope_type {kind} is not known to have")
    return facts


def _factors(entries: ConfigEntries, kind: str) -> Json:
    field = f"attention.rotary.scaling.{kind}"
    facts = {
        f"{field}.factor": entries.number("factor"),
        f"{field}.originalSequenceLength": entries.number("original_max_position_embeddings"),
    }
    if kind == "llama3":
        return facts | {
            f"{field}.lowFrequencyFactor": entries.number("low_freq_factor"),
            f"{field}.highFrequencyFactor": entries.number("high_freq_factor"),
        }
    if entries.get("truncate", _YARN["truncate"]) is not True:
        raise UnfitWeights("rope_parameters.truncate is not true, and ours always rounds to whole pairs")
    return facts | {
        f"{field}.betaFast": entries.number("beta_fast", _YARN["beta_fast"]),
        f"{field}.betaSlow": entries.number("beta_slow", _YARN["beta_slow"]),
        f"{field}.attentionFactor": entries.get("attention_factor", _YARN["attention_factor"]),
    }


def join_parameters(entries: ConfigEntries, base: float) -> Json:
    """Return the content of `rope_parameters`, joined from the entries of both forms. `base`: default of `transformers`
    for the base. Raises UnfitWeights if two entries contradict each other."""
    new, old = ({**(entries.get(name, None) or {})} for name in ("rope_parameters", "rope_scaling"))
    top = entries.get("rope_theta", None)
    for given in (new, old):
        if "type" in given:
            given.setdefault("rope_type", given["type"])
            if given.pop("type") != given["rope_type"]:
                raise UnfitWeights("config.json says type and rope_type of its rotary positions, and they differ")
    parts = [new, old, {} if top is None else {"rope_theta": top}]
    found: Json = {}
    for part in parts:
        for name, value in part.items():
            if found.setdefault(name, value) != value:
                raise UnfitWeights(
                    f"config.json says {name} twice, as {found[name]} and as {value}; make them the same"
                )
    if "rope_type" in found and found["rope_type"] == "yarn":
        found.setdefault("original_max_position_embeddings", entries.get("max_position_embeddings", None))
    return {"rope_theta": base, "rope_type": "default"} | found

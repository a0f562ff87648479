"""What a checkpoint's class has above its last layer: an output head, a judge of texts, or nothing.

Reads `architectures` and the number of labels; the tensors of a judge are `naming/heads.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ullage.anatomy.config.found import Found
from ullage.anatomy.config.keys import MAX_WIDTH
from ullage.anatomy.naming.names import naming_for

Task = Literal["sequence", "token", "question", "reward"]

_MASKED_HEADS = ("ForMaskedLM", "ForCausalLM", "LMHead", "ForPreTraining")
# Classes of encoder-decoders that have the encoder alone.
_ENCODERS_ALONE = ("EncoderModel", "ForTokenClassification")
_NO_HEAD = ("EncoderModel", "ForMultipleChoice")
_JUDGES: dict[str, Task] = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "question",
    "ForRewardModel": "reward",
    "ForProcessRewardModel": "reward",
}
# Reward models give one number, those that judge every step two (vLLM 0.32 qwen2_rm.py).
_REWARD_LABELS = {"ForRewardModel": 1, "ForProcessRewardModel": 2}


def is_encoder_alone(found: Found) -> bool:
    """Whether the class of an encoder-decoder's checkpoint has no decoder."""
    family = found.family
    if family.kind != "encoder-decoder" or family.encoder_key is not None:
        return False
    return found.architecture.endswith(_ENCODERS_ALONE)


def judges_of(found: Found) -> tuple[Task | None, int]:
    """What a classifying head looks at, and how many outputs it has; (None, 0) without one.

    A class whose head is not known counts as one with an output head at most.
    """
    name, text = found.architecture, found.text
    ending = next((end for end in _JUDGES if name.endswith(end)), None)
    if ending is None:
        return None, 0
    task = _JUDGES[ending]
    naming = naming_for(name, found.model_type, found.family.name)
    if is_encoder_alone(found) and naming.encoder:
        naming = naming_for(naming.encoder)
    if all(extra.scope != task for extra in naming.judges):
        return None, 0
    if ending in _REWARD_LABELS:
        return task, _REWARD_LABELS[ending]
    for section in (*found.around, text):  # the outermost counts, as in transformers
        words = section.values.get("id2label")
        if isinstance(words, Mapping) and words:
            text.reading.source("num_labels", len(words), f"config: {section.path}id2label")
            return task, len(words)
        for key in ("num_labels", "_num_labels"):
            if section.has(key):
                return task, section.integer(key, maximum=MAX_WIDTH)
    text.reading.source("num_labels", 2, "default: two labels")
    return task, 2


def has_lm_head(found: Found) -> bool:
    """Whether the checkpoint's class has an output head; a bare …Model has none."""
    name, family = found.architecture, found.family
    if name.endswith(tuple(_JUDGES)):
        if judges_of(found)[0] is not None:
            return False
        return found.text.reading.decide(
            "architectures",
            f"{name}, whose head is not known",
            likely=False,
            low=False,
            high=True,
            widens=("weights",),
        )
    if name.endswith(_NO_HEAD):
        return False
    if family.masked_lm:
        if not name:
            return found.text.reading.decide(
                "architectures",
                "absent, so whether there is an output head is not said",
                likely=False,
                low=False,
                high=True,
                widens=("weights",),
            )
        return any(word in name for word in _MASKED_HEADS)
    bare = name.endswith("Model") and not any(
        word in name for word in ("LMHead", "ChatGLM", "MTModel")
    )
    return not (bare and not found.around)

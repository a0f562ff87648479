"""Encoders, encoder-decoders and older decoders against transformers' own models."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import transformers_models as oracle

from ullage.anatomy.config.read import read_config
from ullage.anatomy.spec import Anatomy, Attention
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.errors import BadInput

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

Change = dict[str, Any]


def built(name: str, **changes: Any) -> tuple[dict[str, Any], Any]:
    """(config.json, meta model) of a class's defaults cut to a few layers."""
    cls = getattr(transformers, name)
    kind = cls.config_class
    known = set(getattr(kind, "__dataclass_fields__", {}))
    short = {k: v for k, v in oracle.SHORT.items() if k in known and "layer_types" not in known}
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        config = kind(**short | changes)
        model = cls._from_config(config)
    return oracle.as_json(config, model), model


def stored(model: Any) -> int:
    return sum(_elements(shape) for shape in oracle.state_shapes(model).values())


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def predicted(made: Anatomy) -> tuple[int, int, int]:
    low, likely, high = (
        sum(t.num_elements for t in expected_tensors(spec))
        for spec in (made.low, made.spec, made.high)
    )
    return low, likely, high


def names_and_shapes(made: Anatomy) -> dict[str, tuple[int, ...]]:
    return {
        t.name.replace("{e}", str(e)): t.shape
        for t in expected_tensors(made.spec)
        for e in range(t.count)
    }


NAMED_BY_DEFAULT = """
BigBirdForMaskedLM BigBirdForCausalLM LukeForMaskedLM LayoutLMForMaskedLM LongformerForMaskedLM
NystromformerForMaskedLM MraForMaskedLM RoCBertForMaskedLM RoCBertForCausalLM RoFormerForMaskedLM
RoFormerForCausalLM YosoForMaskedLM RemBertForMaskedLM RemBertForCausalLM EsmcForMaskedLM
FNetForMaskedLM UltrabertForMaskedLM LEDForConditionalGeneration LongT5ForConditionalGeneration
PegasusXForConditionalGeneration Speech2TextForConditionalGeneration
Pop2PianoForConditionalGeneration ProphetNetForConditionalGeneration ProphetNetForCausalLM
MoonshineForConditionalGeneration UdopForConditionalGeneration
SwitchTransformersForConditionalGeneration NllbMoeForConditionalGeneration
FSMTForConditionalGeneration TrOCRForCausalLM BigBirdPegasusForConditionalGeneration
BigBirdPegasusForCausalLM CTRLLMHeadModel SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText
DiaForConditionalGeneration T5EncoderModel UMT5EncoderModel
""".split()  # noqa: SIM905
# (class, changes to its defaults): read to the last element, and named as on disk
NAMED: list[tuple[str, Change]] = [
    *((name, {}) for name in NAMED_BY_DEFAULT),
    ("BigBirdForMaskedLM", {"use_bias": False, "attention_type": "original_full"}),
    ("LukeForMaskedLM", {"entity_emb_size": 768}),
    ("LukeForMaskedLM", {"use_entity_aware_attention": False}),
    ("NystromformerForMaskedLM", {"conv_kernel_size": 33}),
    ("YosoForMaskedLM", {"conv_window": 33}),
    ("RoCBertForMaskedLM", {"enable_shape": False}),
    ("RoCBertForMaskedLM", {"concat_input": False}),
    ("RoFormerForMaskedLM", {"embedding_size": 256}),
    ("FSMTForConditionalGeneration", {"src_vocab_size": 1000, "tgt_vocab_size": 2000}),
    ("Speech2TextForConditionalGeneration", {"conv_kernel_sizes": [7, 3], "input_channels": 2}),
    ("ProphetNetForConditionalGeneration", {"ngram": 3, "num_decoder_attention_heads": 8}),
    ("SwitchTransformersForConditionalGeneration", {"num_experts": 4, "router_bias": True}),
    ("BigBirdPegasusForConditionalGeneration", {"use_bias": True}),
]
# the same, but parts of their names are not predicted: words of the configuration, or towers
COUNTED: list[tuple[str, Change]] = [
    ("XmodForMaskedLM", {"languages": ["en_XX", "de_DE", "fr_XX"], "adapter_layer_norm": True}),
    ("XmodForMaskedLM", {"pre_norm": True, "adapter_reduction_factor": 4}),
    ("XmodForCausalLM", {}),
    ("EsmForMaskedLM", {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}),
    (
        "EsmForMaskedLM",
        {
            "vocab_size": 33,
            "pad_token_id": 1,
            "mask_token_id": 32,
            "position_embedding_type": "rotary",
            "emb_layer_norm_before": True,
        },
    ),
    ("LongT5ForConditionalGeneration", {"encoder_attention_type": "transient-global"}),
    ("XLMWithLMHeadModel", {"n_langs": 3}),
    ("FlaubertWithLMHeadModel", {}),
    ("T5GemmaForConditionalGeneration", {}),
    ("BlipForConditionalGeneration", {}),
    ("GitForCausalLM", {}),
    ("Kosmos2ForConditionalGeneration", {}),
    ("Kosmos2_5ForConditionalGeneration", {}),
    ("Pix2StructForConditionalGeneration", {}),
    ("CohereAsrForConditionalGeneration", {}),
    ("CanaryForConditionalGeneration", {}),
]


@pytest.mark.parametrize(("name", "changes"), NAMED)
def test_every_tensor_is_named_and_shaped_as_on_disk(name: str, changes: Change) -> None:
    config, model = built(name, **changes)
    assert names_and_shapes(read_config(config, file=name)) == oracle.disk_shapes(model)


@pytest.mark.parametrize(("name", "changes"), COUNTED)
def test_every_element_is_counted(name: str, changes: Change) -> None:
    config, model = built(name, **changes)
    made = read_config(config, file=name)
    assert predicted(made) == (stored(model),) * 3


def test_an_encoder_of_another_width_is_read_by_cross_attention() -> None:
    """T5Gemma 9B-2B: the decoder's K and V are made of the wider encoder's states."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.T5GemmaConfig(
            encoder={"hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4},
            decoder={"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
        )
        with torch.device("meta"):
            model = transformers.T5GemmaForConditionalGeneration._from_config(config)
    made = read_config(oracle.as_json(config, model), file="t5gemma")
    assert (made.spec.hidden_size, made.spec.encoder_hidden_size) == (256, 512)
    assert names_and_shapes(made) == oracle.disk_shapes(model)


def test_approximated_attention_brackets_the_work_and_nothing_else() -> None:
    config, _ = built("BigBirdForMaskedLM")
    made = read_config(config, file="f")
    assert [u.widens for u in made.spec.unknowns] == [("flops",)]
    low, likely, high = (spec.layers[0].mixer for spec in (made.low, made.spec, made.high))
    assert isinstance(low, Attention) and isinstance(likely, Attention)
    assert (low.window, likely.window) == (1, None) and likely == high
    full = read_config({**config, "attention_type": "original_full"}, file="f")
    assert full.spec.unknowns == ()


def test_what_a_row_does_not_describe_is_refused_by_name() -> None:
    config, _ = built("SeamlessM4TForTextToText")
    with pytest.raises(BadInput, match=r"architectures: .*SeamlessM4TForSpeechToText"):
        read_config({**config, "architectures": ["SeamlessM4TForSpeechToText"]}, file="f")
    config, _ = built("Speech2TextForConditionalGeneration")
    with pytest.raises(BadInput, match="num_conv_layers: 3"):
        read_config({**config, "num_conv_layers": 3}, file="f")


def test_experts_of_both_stacks_lie_where_the_library_puts_them() -> None:
    config, _ = built("SwitchTransformersForConditionalGeneration")
    config["decoder_sparse_step"] = 0
    spec = read_config(config, file="f").spec
    assert not any(type(x.feed_forward).__name__ == "Experts" for x in spec.layers)
    assert any(type(x.feed_forward).__name__ == "Experts" for x in spec.encoder_layers)


# --- heads of classifiers ------------------------------------------------------------------------

JUDGES = """
LlamaForSequenceClassification LlamaForTokenClassification LlamaForQuestionAnswering
Qwen2ForSequenceClassification Qwen3ForSequenceClassification Qwen3ForTokenClassification
MistralForSequenceClassification Gemma2ForSequenceClassification GPT2ForSequenceClassification
GPT2ForTokenClassification BloomForTokenClassification FalconForTokenClassification
GPTNeoXForTokenClassification BertForSequenceClassification BertForTokenClassification
BertForQuestionAnswering RobertaForSequenceClassification RobertaForTokenClassification
XLMRobertaForSequenceClassification DistilBertForSequenceClassification
DistilBertForQuestionAnswering AlbertForSequenceClassification AlbertForTokenClassification
DebertaV2ForSequenceClassification DebertaV2ForTokenClassification
ElectraForSequenceClassification MPNetForSequenceClassification
ModernBertForSequenceClassification ModernBertForTokenClassification
ModernBertForQuestionAnswering EuroBertForSequenceClassification LukeForTokenClassification
LayoutLMForTokenClassification BigBirdForQuestionAnswering BigBirdForSequenceClassification
RoFormerForSequenceClassification RemBertForSequenceClassification BartForSequenceClassification
T5ForSequenceClassification T5ForTokenClassification T5ForQuestionAnswering
T5GemmaForTokenClassification
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", JUDGES)
def test_a_judging_head_is_read_as_stored(name: str) -> None:
    labels = 2 if name.endswith("Answering") else 5
    config, model = built(name, num_labels=labels)
    made = read_config(config, file=name)
    assert not made.spec.lm_head
    assert made.spec.num_labels == labels
    assert predicted(made)[1] == stored(model)
    assert not [u for u in made.spec.unknowns if "weights" in u.widens]


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "BertForTokenClassification"])
def test_a_judging_head_is_named_as_stored(name: str) -> None:
    config, model = built(name, num_labels=3)
    assert names_and_shapes(read_config(config, file=name)) == oracle.disk_shapes(model)


def test_reward_models_have_an_mlp_with_one_output_or_two() -> None:
    """Qwen2.5-Math-RM and -PRM, as vLLM 0.32 (qwen2_rm.py) loads them."""
    config, _ = built("Qwen2ForSequenceClassification", hidden_size=64)
    for name, labels in (("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)):
        tensors = names_and_shapes(read_config({**config, "architectures": [name]}, file="f"))
        assert {k: v for k, v in tensors.items() if k.startswith("score")} == {
            "score.0.weight": (64, 64),
            "score.0.bias": (64,),
            "score.2.weight": (labels, 64),
            "score.2.bias": (labels,),
        }
        assert "lm_head.weight" not in tensors


def test_a_head_that_no_row_describes_brackets_the_weights() -> None:
    config, _ = built("XLMWithLMHeadModel")
    config["architectures"] = ["XLMForSequenceClassification"]
    made = read_config(config, file="f")
    low, _, high = predicted(made)
    assert low < high
    assert "architectures" in {u.field for u in made.spec.unknowns}
    model = built("XLMForSequenceClassification")[1]
    assert low <= stored(model) <= high


def test_labels_are_counted_where_the_configuration_says_them() -> None:
    config, _ = built("LlamaForSequenceClassification", num_labels=4)
    assert json.dumps(config["id2label"]).count("LABEL_") == 4
    bare = {k: v for k, v in config.items() if k not in ("id2label", "label2id", "num_labels")}
    assert read_config(bare, file="f").spec.num_labels == 2
    assert read_config({**bare, "num_labels": 1}, file="f").spec.num_labels == 1

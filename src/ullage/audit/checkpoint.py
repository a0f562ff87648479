"""Rules about the checkpoint's files: shards, pickles, code, stored dtypes, tied embeddings.

Holds rules on what lies on disk; tensors against the spec are `tensors.py`, quantised ones
`quantization.py`. Nothing of a checkpoint is executed: headers and names are all that is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.anatomy.checkpoint import CheckpointIndex
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject, unit_count
from ullage.findings.finding import Evidence, Severity

PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
NOT_WEIGHTS = ("training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state", "tokenizer.")
HEAD_NAMES = ("lm_head.weight", "embed_out.weight")
# GGUF's and Mistral's name of the head; layers end in it too (blk.0.attn_output.weight).
WHOLE_HEAD_NAME = "output.weight"
FLOAT_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
NO_HEADERS = NotEvaluable(("headers of safetensors or GGUF files beside the configuration",))


def headers(subject: Subject) -> CheckpointIndex | None:
    """The checkpoint when at least one header of it was read."""
    checkpoint = subject.model.checkpoint
    return checkpoint if checkpoint is not None and checkpoint.has_headers else None


def _shards(subject: Subject) -> Verdict:
    checkpoint = subject.model.checkpoint
    if checkpoint is None:
        return NO_HEADERS
    absent, lost = checkpoint.missing_files, checkpoint.absent_tensors
    facts = (
        Evidence("files read", len(checkpoint.files), "", f"{checkpoint.format} headers"),
        Evidence("files missing", len(absent), "", "index file or split count"),
        Evidence("tensors promised and absent", len(lost), "", "index file"),
    )
    if absent:
        return Fired(
            f"{unit_count(len(absent), 'weight file')} of the checkpoint "
            f"{'is' if len(absent) == 1 else 'are'} missing, the first is {absent[0]}.",
            "Download the checkpoint again (`hf download` takes up where it stopped), then compare "
            "the files with the index.",
            facts,
        )
    if lost:
        name, file = lost[0]
        return Fired(
            f"The index promises {unit_count(len(lost), 'tensor')} that the files do not hold, the "
            f"first is {name} in {file}: index and shards are of different versions.",
            "Download index and shards of one revision.",
            facts,
        )
    return Clear(facts)


def _total(subject: Subject) -> Verdict:
    checkpoint = headers(subject)
    if checkpoint is None:
        return NO_HEADERS
    if checkpoint.declared_bytes is None:
        return Clear((Evidence("bytes that an index declares", None, "bytes", "no index file"),))
    if not checkpoint.is_complete:
        return NotEvaluable(("all shards of the checkpoint",))
    declared, stored = checkpoint.declared_bytes, checkpoint.num_bytes
    facts = (
        Evidence("bytes declared", declared, "bytes", "index: metadata.total_size"),
        Evidence("bytes stored", stored, "bytes", "safetensors headers"),
    )
    if declared != stored:
        return Fired(
            f"The index declares {declared:,} bytes of tensors and the files hold {stored:,}: "
            "some shard was replaced or converted after the index was written.",
            "Take index and shards from one revision; if the conversion was yours, write the "
            "index again.",
            facts,
        )
    return Clear(facts)


def _strangers(subject: Subject) -> Verdict:
    checkpoint = headers(subject)
    if checkpoint is None:
        return NO_HEADERS
    doubled, unused = checkpoint.duplicate_tensors, checkpoint.unused_files
    facts = (
        Evidence("tensors stored twice", len(doubled), "", f"{checkpoint.format} headers"),
        Evidence("weight files of another checkpoint", len(unused), "", "directory"),
    )
    if doubled:
        name, file = doubled[0]
        return Fired(
            f"{unit_count(len(doubled), 'tensor')} stored twice, the first is {name} (again in "
            f"{file}): which copy is loaded depends on the order of reading.",
            "Keep one copy: remove the files of the other checkpoint from the directory.",
            facts,
            Severity.warning,
        )
    if unused:
        return Fired(
            f"The directory also holds weights of another checkpoint ({unused[0]}), which cost "
            "disk and download time.",
            "Keep one format in the directory that servers pull from.",
            facts,
        )
    return Clear(facts)


def _pickles(subject: Subject) -> Verdict:
    files = subject.model.files
    if files.kind != "directory":
        return NotEvaluable(("the model's directory",))
    pickled = [
        name
        for name in files.other_files
        if name.endswith(PICKLE_ENDINGS) and not name.startswith(NOT_WEIGHTS)
    ]
    facts = (Evidence("pickled weight files", len(pickled), "", "directory"),)
    if not pickled:
        return Clear(facts)
    only = headers(subject) is None
    return Fired(
        f"{pickled[0]} {f'and {len(pickled) - 1} more ' if len(pickled) > 1 else ''}"
        "can run code when loaded"
        + (", and there are no safetensors beside it." if only else "; safetensors lie beside it."),
        "Convert to safetensors on a machine that may be lost, and remove the pickles."
        if only
        else "Remove the pickled copy, or pass --load-format safetensors so that it is not read.",
        facts,
        Severity.warning if only else None,
    )


def _pickle_imports(subject: Subject) -> Verdict:
    listed = subject.pickles
    if listed is None:
        return NotEvaluable(("the model's directory",))
    facts = (
        Evidence("pickled files followed", len(listed), "", "opcodes; nothing was loaded"),
        Evidence("names imported", sum(len(p.imports) for p in listed), "", "opcodes"),
    )
    for pickled in listed:
        if pickled.dangerous:
            names = ", ".join(pickled.dangerous[:3])
            return Fired(
                f"Loading {pickled.file} would import {names}: it runs code of its author's "
                "choice, whatever it is called.",
                "Do not load this file, here or elsewhere; delete it, and treat a machine that has "
                "loaded it as lost.",
                (*facts, *(Evidence("import", n, "", "opcodes") for n in pickled.dangerous[:10])),
            )
    beyond = [p for p in listed if p.beyond_tensors and not _is_side_pickle(p.file)]
    if beyond:
        names = ", ".join(beyond[0].beyond_tensors[:3])
        return Fired(
            f"Loading {beyond[0].file} would import {names}, which tensors have no need of: "
            "torch.load refuses it with weights_only, and without that their code runs.",
            "Convert to safetensors on a machine that may be lost.",
            (
                *facts,
                *(Evidence("import", n, "", "opcodes") for n in beyond[0].beyond_tensors[:10]),
            ),
            Severity.warning,
        )
    unread = [p for p in listed if p.reason is not None]
    if unread:
        return NotEvaluable(tuple(f"all opcodes of {p.file} ({p.reason})" for p in unread[:3]))
    return Clear(facts)


def _is_side_pickle(file: str) -> bool:
    """Training state beside the weights: engines do not load it."""
    return file.replace("\\", "/").rpartition("/")[2].startswith(NOT_WEIGHTS)


def _remote_code(subject: Subject) -> Verdict:
    files = subject.model.files
    named: list[str] = []
    for place in (subject.config, files.tokenizer_config or {}):
        mapped = place.get("auto_map")
        if isinstance(mapped, Mapping):
            named += [
                str(item[0] if isinstance(item, list) and item else item)
                for item in mapped.values()
            ]
    scripts = [name for name in files.other_files if name.endswith(".py")]
    facts = (
        Evidence("classes in auto_map", len(named), "", "config.json, tokenizer_config.json"),
        Evidence("Python files", len(scripts), "", "directory"),
    )
    if not named:
        return Clear(facts)
    return Fired(
        f"auto_map names Python code of the checkpoint ({named[0][:60]}); engines without an "
        "implementation of their own run it, with the server's rights, under --trust-remote-code.",
        "Leave --trust-remote-code off unless the engine refuses without it; then read the code "
        "and pin it with --revision and --code-revision.",
        facts,
    )


def _is_head(name: str) -> bool:
    return name.endswith(HEAD_NAMES) or name == WHOLE_HEAD_NAME


def _head(subject: Subject) -> Verdict:
    checkpoint, spec = headers(subject), subject.spec
    if not spec.lm_head:
        return Clear((Evidence("lm_head", "none in this architecture", "", "spec"),))
    if checkpoint is None:
        return NO_HEADERS
    if not checkpoint.is_complete:
        return NotEvaluable(("all shards of the checkpoint",))
    stored = next((t for t in checkpoint.tensors if _is_head(t.name)), None)
    facts = (
        subject.fact("tie_word_embeddings", spec.tie_embeddings),
        Evidence("lm_head", stored.name if stored else None, "", f"{checkpoint.format} headers"),
    )
    if stored is None and not spec.tie_embeddings:
        return Fired(
            "tie_word_embeddings is false but the checkpoint stores no output head: the engine "
            "stops, or starts with a head of noise.",
            "Set tie_word_embeddings to true in config.json if the model shares its embedding, "
            "else take the complete checkpoint.",
            facts,
            Severity.error,
        )
    if stored is not None and spec.tie_embeddings:
        return Fired(
            f"tie_word_embeddings is true, yet {stored.name} is stored "
            f"({stored.num_bytes:,} bytes): engines drop it and use the embedding. A copy "
            "only costs the download; a head that was trained apart would be lost.",
            "Set tie_word_embeddings to false in config.json if the two differ, else remove the "
            "stored head.",
            facts,
            Severity.info,
        )
    return Clear(facts)


def _stored_dtype(subject: Subject) -> Verdict:
    checkpoint = headers(subject)
    if checkpoint is None:
        return NO_HEADERS
    if subject.spec.quantization is not None:
        return Clear((Evidence("quantised", True, "", subject.where("quantization_config")),))
    by_dtype: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.num_bytes
    main = max(by_dtype, key=lambda dtype: by_dtype[dtype], default="")
    stored, said = FLOAT_NAMES.get(main), subject.spec.dtype
    facts = (
        Evidence("dtype of most bytes", main, "", f"{checkpoint.format} headers"),
        subject.fact("dtype", said, "dtype", "torch_dtype"),
    )
    if stored is None or stored == said:
        return Clear(facts)
    return Fired(
        f"Most bytes are stored as {stored} while config.json says {said}: the engine casts them "
        "on load" + (", and the download is twice what is served." if main == "F32" else "."),
        f"Set dtype in config.json to {stored}, or pass --dtype {stored} to serve what was stored.",
        facts,
        Severity.warning if {stored, said} == {"float16", "bfloat16"} else None,
    )


RULES = (
    Rule(
        id="A121",
        title="Weight files that the checkpoint promises",
        severity=Severity.error,
        category="checkpoint",
        why="An index names each tensor's file. A shard that is absent, or of another version, "
        "stops the load after minutes of reading the others.",
        fix="Download index and shards of one revision.",
        source="safetensors index format; GGUF split naming",
        example="model.safetensors.index.json that names a shard which is not there",
        check=_shards,
    ),
    Rule(
        id="A122",
        title="Total size in the index",
        severity=Severity.warning,
        category="checkpoint",
        why="The index states the bytes of all tensors. A difference means that files of different "
        "versions lie together.",
        fix="Take index and shards from one revision.",
        source="safetensors index format, metadata.total_size",
        example="an index of the bfloat16 checkpoint beside shards in float32",
        check=_total,
    ),
    Rule(
        id="A123",
        title="Weights of one checkpoint only",
        severity=Severity.info,
        category="checkpoint",
        why="Two checkpoints in one directory cost disk, and the same tensor stored twice makes "
        "the result depend on the order of reading.",
        fix="Keep one checkpoint per directory.",
        source="vllm 0.32: model_executor/model_loader/weight_utils.py",
        example="consolidated.safetensors beside model-00001-of-00002.safetensors",
        check=_strangers,
    ),
    Rule(
        id="A124",
        title="Pickled weights",
        severity=Severity.info,
        category="checkpoint",
        why="A pickle is a program: loading one from a stranger runs it. safetensors hold numbers "
        "only.",
        fix="Convert to safetensors, and remove the pickles.",
        source="Python pickle documentation; PyTorch 2.13 torch.load",
        example="pytorch_model.bin in the directory",
        check=_pickles,
    ),
    Rule(
        id="A125",
        title="Code that the checkpoint brings",
        severity=Severity.info,
        category="checkpoint",
        why="auto_map points at Python files of the checkpoint, which run with the server's rights "
        "once --trust-remote-code is given.",
        fix="Leave --trust-remote-code off where the engine has its own implementation.",
        source="transformers 5.24 dynamic modules; vllm 0.32 --trust-remote-code",
        example='auto_map {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}',
        check=_remote_code,
    ),
    Rule(
        id="A126",
        title="Output head against tie_word_embeddings",
        severity=Severity.warning,
        category="checkpoint",
        why="A tied model uses its embedding as output head. When flag and files disagree, either "
        "the head is noise or a trained one is dropped.",
        fix="Make tie_word_embeddings say what the files hold.",
        source="transformers 5.24 tie_weights; vllm 0.32 models skip lm_head when tied",
        example="tie_word_embeddings false without lm_head.weight",
        check=_head,
    ),
    Rule(
        id="A127",
        title="Stored dtype against the configuration",
        severity=Severity.info,
        category="checkpoint",
        why="Engines take the dtype from config.json and cast what is stored. bfloat16 and float16 "
        "differ in range and precision, float32 in size.",
        fix="Make dtype in config.json say what is stored.",
        source="vllm 0.32: config/model.py, _get_and_verify_dtype",
        example="BF16 tensors under dtype float16",
        check=_stored_dtype,
    ),
    Rule(
        id="A128",
        title="What pickled files would import",
        severity=Severity.error,
        category="safety",
        why="A pickle names the functions that loading it calls. Tensors need a handful of "
        "torch's; os.system, eval or getattr mean that the file is an attack.",
        fix="Delete the file; take safetensors from a source that you trust.",
        source="Python pickle opcodes; torch 2.13 weights_only unpickler",
        example="pytorch_model.bin whose opcodes import posix.system",
        check=_pickle_imports,
    ),
)

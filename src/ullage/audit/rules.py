"""The table of all rules, and the choice of some of them by id.

Holds the table only: a new rule is a `Rule` in the module of its concern. Ids are for ever; the
tens group them: 00 attention, 02 positions, 04 feed-forward, 05 norms, 06 parallelism, 08
quantisation, 10 tokenizer, 12 checkpoint, 14 fit, towers and drafts, 15 the
weights themselves, 16 and 17 the command that starts the server and what surrounds it.
"""

from __future__ import annotations

from collections.abc import Collection

from ullage.audit import (
    attention,
    checkpoint,
    declared,
    extras,
    feed_forward,
    fit,
    fused_cuts,
    generation,
    launch_flags,
    launch_hosts,
    launch_limits,
    launch_overrides,
    parallel_rules,
    positions,
    quantization,
    quantized_cuts,
    rope_keys,
    short_prompts,
    tensors,
    tokenizer,
    weights,
    weights_layers,
    weights_norms,
)
from ullage.audit.rule import Rule
from ullage.errors import BadUsage

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            *attention.RULES,
            *positions.RULES,
            *rope_keys.RULES,
            *feed_forward.RULES,
            *parallel_rules.RULES,
            *tokenizer.RULES,
            *fused_cuts.RULES,
            *generation.RULES,
            *checkpoint.RULES,
            *declared.RULES,
            *tensors.RULES,
            *fit.RULES,
            *short_prompts.RULES,
            *extras.RULES,
            *quantization.RULES,
            *quantized_cuts.RULES,
            *weights.RULES,
            *weights_layers.RULES,
            *weights_norms.RULES,
            *launch_flags.RULES,
            *launch_limits.RULES,
            *launch_overrides.RULES,
            *launch_hosts.RULES,
        ),
        key=lambda rule: rule.id,
    )
)


def find_rule(rule_id: str) -> Rule:
    """The rule of that id, whatever its case. Raises BadUsage when there is none."""
    wanted = rule_id.strip().upper()
    for rule in RULES:
        if rule.id == wanted:
            return rule
    raise BadUsage(
        f"there is no rule {rule_id[:20]!r}",
        expected=f"an id from {RULES[0].id} to {RULES[-1].id}, as `ullage audit` prints them",
    )


def choose(select: Collection[str], ignore: Collection[str]) -> tuple[Rule, ...]:
    """The rules whose ids are in `select` (empty: all) and not in `ignore`. Raises BadUsage."""
    selected = {find_rule(rule_id).id for rule_id in select}
    ignored = {find_rule(rule_id).id for rule_id in ignore}
    return tuple(
        rule for rule in RULES if (not selected or rule.id in selected) and rule.id not in ignored
    )

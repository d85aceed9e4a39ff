"""Rules: what is copied from region to region. The first rule that fits a namespace decides; what none fits stays.

namespace {model, tenant} of region `from` ──▶ rule 1 ──▶ rule 2 ──▶ … ──▶ not copied
                                                 │ copy, at this priority and rate
                                                 └ skip

Weights of models have rules of their own, so that a rule of KV, which is small, brings no terabyte with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import msgspec
import xxhash

from tiers.namespace_spec import NamespaceSpec


@dataclass(frozen=True, slots=True)
class Rule:
    """sources, to: names of regions, empty: all. models, tenants: patterns with * and ?; namespaces: beginnings
    of digests in hex; empty: all. bytes_per_s: of everything copied by this rule, 0: no limit. of_weights: it is about the weights of
    these models, as they were published, and about nothing else."""

    sources: tuple[str, ...] = ()
    to: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    copies: bool = True
    priority: int = 0
    bytes_per_s: int = 0
    of_weights: bool = False

    def fits(self, source: str, to: str, spec: NamespaceSpec) -> bool:
        """Whether this rule decides about a namespace of region `source`, for region `to`."""
        return (
            not self.of_weights
            and self.is_between(source, to)
            and any_fits(self.models, spec.fields.get("model", ""))
            and any_fits(self.tenants, spec.fields.get("tenant", ""))
            and (not self.namespaces or spec.digest.hex().startswith(self.namespaces))
        )

    def fits_weights(self, source: str, to: str, model: str) -> bool:
        """Whether it decides about the weights of this model."""
        return self.of_weights and self.is_between(source, to) and any_fits(self.models, model)

    def is_between(self, source: str, to: str) -> bool:
        """Whether it is about copies from region `source` to region `to`."""
        return (not self.sources or source in self.sources) and (not self.to or to in self.to)


def choice_of(rules: Sequence[Rule], source: str, to: str) -> str:
    """Differs where other things may be copied: what one choice of rules has brought says nothing about another one. Rates and
    priorities decide nothing."""
    deciding = [replace(rule, priority=0, bytes_per_s=0) for rule in rules if rule.is_between(source, to)]
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(deciding))


def first_weights_rule(rules: Sequence[Rule], source: str, to: str, model: str) -> Rule | None:
    """The rule that decides about a model's weights, be they copied or not; None without any."""
    return next((rule for rule in rules if rule.fits_weights(source, to, model)), None)


def weights_rule_for(rules: Sequence[Rule], source: str, to: str, model: str) -> Rule | None:
    """The rule by which a model's weights are copied; None if they are not."""
    rule = first_weights_rule(rules, source, to, model)
    return rule if rule is not None and rule.copies else None


def first_rule(rules: Sequence[Rule], source: str, to: str, spec: NamespaceSpec) -> Rule | None:
    """The rule that decides about a namespace, be it copied or not; None without any."""
    return next((rule for rule in rules if rule.fits(source, to, spec)), None)


def rule_for(rules: Sequence[Rule], source: str, to: str, spec: NamespaceSpec) -> Rule | None:
    """The rule by which a namespace is copied; None if it is not."""
    rule = first_rule(rules, source, to, spec)
    return rule if rule is not None and rule.copies else None


def sources_for(rules: Sequence[Rule], to: str, regions: Iterable[str]) -> list[str]:
    """The regions from which something may be copied to this one."""
    copies = [rule for rule in rules if rule.copies and (not rule.to or to in rule.to)]
    return [
        region
        for region in regions
        if region != to and any(not rule.sources or region in rule.sources for rule in copies)
    ]


def any_fits(patterns: Sequence[str], name: str) -> bool:
    """Whether a name fits one of these patterns with * and ?; without any, it does."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

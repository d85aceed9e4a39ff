"""Whether a region's bucket has what was announced, and nothing else; what is wrong, and its repair.

  kvstore region verify NAME                 by listings
  kvstore region verify NAME --deep          read every byte of its packs, too
  kvstore region verify NAME --repair        announce what is sound and unknown, delete what is damaged
  kvstore region verify NAME --against OTHER what should be copied from there, and is not

Exit code 0 when nothing was found, or all of it was repaired, 1 when not or when the bucket refuses, 2 for wrong words, 4 when a bucket
does not answer; what was found and repaired before is told.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.tools.cli import FAILED, OK, USAGE, CliError
from kvstore.tools.cli.buckets import asked, code_of
from kvstore.tools.cli.commands.region import add_region_arguments, load_deployment
from kvstore.tools.cli.options import is_of_node, size
from kvstore.tools.cli.output import Progress, later, present, progress_bars, say
from kvstore.units import count, format_bytes, plural
from tiers.scratch import scratch_directory

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment
    from replication.audit.orphans import Finding
    from replication.mirror.verify import Deep, Outside

FINDINGS_TOLD = 1000  # in the JSON; all are counted
LINES_TOLD = 20  # of each kind, for people
SPEED_BYTES_MAX = 1 << 40


class Asked(NamedTuple):
    """What is to be done. deep: None where packs are not read. against: another region, "" for none."""

    region: str
    deep: Deep | None
    repairs: bool
    against: str


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deep", action="store_true", help="read packs, too, and compare every checksum")
    parser.add_argument(
        "--sample", default="", metavar="SHARE", help="of the packs, with --deep, such as 1%% (default: all)"
    )
    parser.add_argument(
        "--bytes-per-s", default="", metavar="SIZE", help="read no faster, with --deep, such as 50MiB"
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="announce what is sound and unknown, delete what is damaged; with --against, copy models that are not here",
    )
    parser.add_argument(
        "--against", default="", metavar="NAME", help="a region: what should be copied from it, and is not"
    )
    add_region_arguments(parser)


def run_verb(args: argparse.Namespace) -> int:
    """Verify a region, say what was found; the exit code. Raises CliError."""
    if is_of_node(args):
        from kvstore.tools.cli.nodes import run_there

        wanted = _fields(args)
        return run_there(args, args.called, lambda node: node.verify_region(args.region, **wanted), _show)
    return _verify(args, load_deployment(args))


def _asked_for(args: argparse.Namespace, deployment: Deployment) -> Asked:
    """Raises CliError."""
    from replication.mirror.verify import Deep

    for option, name in (("NAME", args.region), ("--against", args.against)):
        if name or option == "NAME":
            deployment.place(name, f"region verify: {option}")
    if args.against == args.region:
        raise CliError(f"region verify: --against {args.against}: is the region itself", exit_code=USAGE)
    for option, value in (("--sample", args.sample), ("--bytes-per-s", args.bytes_per_s)):
        if value and not args.deep:
            raise CliError(f"region verify: {option} needs --deep", exit_code=USAGE)
    deep = Deep(_share(args.sample), _speed(args.bytes_per_s)) if args.deep else None
    return Asked(args.region, deep, args.repair, args.against)


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """The same for another node, which knows its regions itself. Raises CliError."""
    share = _share(args.sample) if args.sample else 0.0
    return {
        "deep": args.deep,
        "share": share,
        "bytes_per_s": _speed(args.bytes_per_s),
        "against": args.against,
    }


def _speed(text: str) -> int:
    return size("region verify: --bytes-per-s", text, 1, SPEED_BYTES_MAX) if text else 0


def _share(text: str) -> float:
    if not text:
        return 1.0
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise CliError(
            f"region verify: --sample {text}: allowed are more than 0 up to 1, or up to 100%", exit_code=USAGE
        )
    return share


def _verify(args: argparse.Namespace, deployment: Deployment) -> int:
    """Verify a region, say what was found; the exit code. Raises CliError."""
    wanted = _asked_for(args, deployment)
    found = _Found()
    with scratch_directory("kvstore-verify-") as directory, progress_bars() as bars:
        facts, code = asked(lambda: _verified(deployment, wanted, directory, found, later(bars)))
    code = max(code, FAILED if found.open else OK)
    facts |= {"repaired": found.repaired, "counts": dict(found.counts), "ok": code == OK}
    present(args, {**facts, "findings": [finding._asdict() for finding in found.told]}, _show)
    return code


class _Found:
    """What was found. open: how much of it was not repaired."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.told: list[Finding] = []
        self.open = self.repaired = 0

    def add(self, finding: Finding) -> None:
        self.counts[finding.kind] += 1
        if len(self.told) < FINDINGS_TOLD:
            self.told.append(finding)
        if finding.repaired:
            self.repaired += 1
        else:
            self.open += 1

    def not_led_over(self, facts: Mapping[str, Any]) -> None:
        """It ended early: without a snapshot nobody goes on behind a gap."""
        if "snapshot" not in facts:
            gaps = [one for one in self.told if one.kind == "gap" and one.repaired]
            self.told = [one._replace(repaired="") if one in gaps else one for one in self.told]
            self.repaired, self.open = self.repaired - len(gaps), self.open + len(gaps)


async def _verified(
    deployment: Deployment, wanted: Asked, directory: Path, found: _Found, progress: Progress
) -> tuple[dict[str, Any], int]:
    """The facts, and the exit code of what kept them from being complete. Raises ReplicationError, TierError where nothing was found yet."""
    from replication.audit.audit import Report
    from replication.errors import ReplicationError
    from tiers.errors import TierError

    home = await followed(deployment, wanted.region, directory, found.add, wanted.repairs)
    report, facts, is_audited = Report(), dict[str, Any](), False
    try:
        try:
            await home.audit(wanted.repairs, found.add, progress, report)
            is_audited = True
            await _verify_more(deployment, wanted, home, directory, found, progress, facts)
            problem, code = {}, OK
        except (ReplicationError, TierError) as error:
            if not (found.told or is_audited):
                raise
            found.not_led_over(facts)
            problem, code = {"problem": str(error)}, code_of(error)
        said = {
            "deployment": deployment.deployment,
            "region": wanted.region,
            "bucket": home.objects.where,
            "announced_packs": report.announced,
            "announced_bytes": report.announced_bytes,
            "packs": report.listed,
            "bytes": report.listed_bytes,
            "models": report.models.listed,
            "announced_models": len(home.catalogue.models),
            "missing_models": report.models.missing,
            "left": report.left + report.models.left,
            "whole": report.is_whole,
        }
        return {**said, **facts, **problem}, code
    finally:
        home.close()


async def _verify_more(
    deployment: Deployment,
    wanted: Asked,
    home: Outside,
    directory: Path,
    found: _Found,
    progress: Progress,
    facts: dict[str, Any],
) -> None:
    """Beyond listings. facts: are added to. Raises ReplicationError, TierError."""
    if wanted.deep is not None:
        read = await home.read(wanted.deep, wanted.repairs, found.add, progress)
        facts |= {"read_packs": read.packs, "read_bytes": read.bytes, "damaged_packs": read.damaged}
        facts["unread_packs"] = read.unread
        chunks = await home.read_models(wanted.deep, wanted.repairs, found.add, progress)
        facts |= {
            "read_chunks": chunks.chunks,
            "read_chunk_bytes": chunks.bytes,
            "damaged_chunks": chunks.damaged,
        }
    if wanted.repairs:
        facts["snapshot"] = await home.end_repair()
    if wanted.against:
        facts["against"] = wanted.against
        source = await followed(deployment, wanted.against, directory, lambda finding: None)
        try:
            rules = deployment.copy_rules()
            facts["lacking_packs"] = await home.lacking(source, rules, found.add)
            facts["lacking_models"] = await home.lacking_models(source, rules, found.add, wanted.repairs)
        finally:
            source.close()


async def followed(
    deployment: Deployment, name: str, directory: Path, told: Callable[[Finding], None], repairs: bool = False
) -> Outside:
    """A region, all of which was read; to be closed."""
    from replication.mirror.verify import Outside

    outside = await Outside.open(
        deployment.regions[name].open(),
        deployment.deployment,
        name,
        directory / name,
        deployment.clock_skew_s,
        random.Random(),
    )
    try:
        await outside.follow(told, repairs)
    except BaseException:
        outside.close()
        raise
    return outside


def _show(facts: dict[str, Any]) -> None:
    say(
        f"{facts['bucket']}: {plural(facts['packs'], 'pack')} ({format_bytes(facts['bytes'])}) there,"
        f" {count(facts['announced_packs'])} announced"
    )
    if facts["models"] or facts["announced_models"] or facts["missing_models"]:
        print(
            f"{plural(facts['models'], 'model')} there, {count(facts['announced_models'])} announced and whole"
        )
    if facts.get("read_chunks"):
        print(
            f"{plural(facts['read_chunks'], 'chunk')} of models ({format_bytes(facts['read_chunk_bytes'])}) read,"
            f" {count(facts['damaged_chunks'])} of them damaged"
        )
    if "read_packs" in facts:
        print(
            f"{plural(facts['read_packs'], 'pack')} ({format_bytes(facts['read_bytes'])}) read,"
            f" {count(facts['damaged_packs'])} of them damaged"
        )
        if facts["unread_packs"]:
            print(f"{plural(facts['unread_packs'], 'pack')} could not be read by this version")
    if "lacking_models" in facts:
        print(
            f"{plural(facts['lacking_packs'], 'pack')} and {plural(facts['lacking_models'], 'model')}"
            f" of {facts['against']} not here that should be"
        )
    lines: Counter[str] = Counter()
    for finding in facts["findings"]:
        kind = finding["kind"]
        lines[kind] += 1
        if lines[kind] <= LINES_TOLD:
            done = f" ({finding['repaired']})" if finding["repaired"] else ""
            say(f"  {kind}: {finding['pack']}: {finding['reason']}{done}", 4)
    for kind, number in facts["counts"].items():
        if number > LINES_TOLD:
            print(f"  {kind}: {count(number)} in all")
    if "problem" in facts:
        say(f"not all was looked at: {facts['problem']}")
    if not facts["whole"]:
        print("there is more than one look can remember: verify again")
    left = sum(facts["counts"].values()) - facts["repaired"]
    words = plural(left, "problem") if left else "sound" if "problem" not in facts else "no problem so far"
    print(f"{words}, {count(facts['repaired'])} repaired" if facts["repaired"] else words)

"""The page of the documentation that shows what a selftest found."""

from typing import Any

from parity.mutations import KINDS
from parity.selftest.outcome import LEGEND, rows
from parity.selftest.planted import Planted

INTRODUCTION = """\
# Who checks the check

A harness that never fails proves nothing. `{command}` plants known porting faults in correct ports, mutates the source
of `flax_transformer` blindly, and checks pairs in which nothing is wrong; all of it through the same entry point and
the same rungs as a user's pair. This page is what one run of it wrote.

- *Detected*: the check fails. *Located*: the first difference that the report names is the place of the planting, or a
  rung about nothing but the planted part (clipping, the optimizer, the schedule, decoding, ...) failed first. *Named*:
  the diagnosis is one that names this fault (`parity/selftest/names.py`).
- Each kind is planted at the first, a middle and the last place where it fits; an empty cell: there is no such place.
- Planting and diagnosis share no code and no table: `parity.mutations` and `parity.diagnose` may not import each other,
  which import-linter checks.

It took {minutes:.0f} minutes. Made with {made}.
"""

BLIND = """\
{blind} mutations were drawn from {blind_candidates} of code that a check executes (an operator, a constant, an axis, an
argument, a line left out); {blind_unreached} more are in code that no check executes. {blind_survivors} were not
noticed. A mutation that changes no program that any of nine configs is traced to, constants included, cannot change a
result of theirs; where a program changes and its results do not, the reason was written by hand
(`parity/selftest/equivalent.py`).
"""


def _command(outcome: dict[str, Any]) -> str:
    quick, seed = " --quick" if outcome["quick"] else "", f" --seed {outcome['seed']}" if outcome["seed"] else ""
    return f"python -m parity selftest{quick}{seed}"


def page(outcome: dict[str, Any]) -> str:
    """Markdown, out of the JSON."""
    planted = [Planted(**each) for each in outcome["plantings"]]
    descriptions = {kind.name: kind.description for kind in KINDS}
    made = ", ".join(f"{library} {version}" for library, version in outcome["environment"].items())
    lines = [INTRODUCTION.format(command=_command(outcome), minutes=outcome["seconds"] / 60, made=made)]
    lines += ["| Goal | Found | Met |", "|---|---|---|"]
    lines += [f"| {goal['what']} | {goal['got']} | {'yes' if goal['met'] else 'no'} |" for goal in outcome["goals"]]
    lines += ["", "## Known faults", "", LEGEND, ""]
    lines += ["| Fault | What the port does | Case | First | Middle | Last | Rung |", "|" + "---|" * 7]
    for name, cases, marks, rungs in rows(planted):
        lines.append(f"| {name} | {_cell(descriptions[name])} | {cases} | {' | '.join(marks)} | {rungs} |")
    lines += ["", "## Beyond the harness", ""]
    lines += ["| Planted and not counted | Place | Detected | Why |", "|---|---|---|---|"]
    reasons = {kind.name: kind.beyond for kind in KINDS}
    for beyond in outcome["beyond"]:
        detected = "yes" if beyond["detected"] else "no"
        lines.append(f"| {beyond['kind']} | {beyond['place']} | {detected} | {reasons[beyond['kind']]} |")
    survivors = [mutant for mutant in outcome["mutants"] if not mutant["detected"]]
    lines += ["", "## Blind mutations that survived", "", BLIND.format(**outcome), ""]
    lines += ["| Where | Change | Why it is none |", "|---|---|---|"]
    for mutant in survivors:
        m = mutant["mutation"]
        change = f"`{_cell(m['before'])}` → `{_cell(m['after'])}`"
        lines.append(f"| {m['file']}, {m['function']} | {change} | {mutant['argument'] or '**unexplained**'} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|") if len(text) < 120 else text.replace("|", "\\|")[:117] + "..."

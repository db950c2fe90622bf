"""Summary and drawings of the page: per group of workloads, for wide and for narrow windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kernel_dispatch.bench.results import Row, Run
from kernel_dispatch.bench.views import drawing, figures, svg
from kernel_dispatch.bench.views.markup import escaped
from kernel_dispatch.bench.views.means import Standing, Standings, case_of, standings

_TITLES = {"model": "Models", "op": "Operators", "overhead": "Overhead"}
_MANY_BARS = 60
_WIDE = 900


def groups(run: Run) -> str:
    """A mean over models and one over single ops say different things, so none is over both."""
    names = sorted(dict.fromkeys(row.group for row in run.rows), key=_order)
    sections = [_group(run, name, [r for r in run.rows if r.group == name]) for name in names]
    return "".join(sections) or "<p>This run has no rows.</p>"


def roofline(run: Run) -> str:
    return both_widths(lambda width: drawing.roofline(run, width=width, inline=True))


def both_widths(draw: Callable[[int], str]) -> str:
    """Scaling one drawing down to a phone would leave text that nobody can read."""
    wide, narrow = draw(_WIDE), draw(drawing.NARROW)
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def key(run: Run, contender: str) -> str:
    """The contender's shape, as in the drawings."""
    shape = svg.mark(run.contenders().index(contender), 7, 7, 5)
    box = 'viewBox="0 0 14 14" width="14" height="14"'
    return f'<svg class="chart key" {box} aria-hidden="true">{shape}</svg>'


def _order(group: str) -> tuple[int, str]:
    known = list(_TITLES)
    return (known.index(group) if group in known else len(known), group)


def _group(run: Run, name: str, rows: Sequence[Row]) -> str:
    title = escaped(_TITLES.get(name, name))
    return f"<section><h2>{title}</h2>{_summary(run, rows)}{_bars(run, rows, title)}</section>"


def _bars(run: Run, rows: Sequence[Row], title: str) -> str:
    compared = [row for row in rows if row.contender != run.baseline]
    if not compared:
        return ""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    bars = both_widths(
        lambda width: drawing.speedup_bars(run, workloads=workloads, width=width, inline=True)
    )
    if len(compared) > _MANY_BARS:
        label = f'role="region" aria-label="Speed-ups: {title}" tabindex="0"'
        bars = f'<div class="tall" {label}>{bars}</div>'
    return f"<figure>{bars}<figcaption>{_CAPTION}</figcaption></figure>"


def _summary(run: Run, rows: Sequence[Row]) -> str:
    found = standings(rows, run.baseline)
    lines = "".join(_standing(run, each) for each in found.standings)
    heads = "".join(f'<th scope="col"{kind}>{title}</th>' for title, kind in _SUMMARY)
    return (
        '<div class="scroll" role="region" aria-label="Summary" tabindex="0">'
        f'<table class="summary"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'
        f'</div><p class="note">{_means_explained(found, len({case_of(row) for row in rows}))}</p>'
    )


_SUMMARY = (
    ("Contender", ""),
    ("Mean speed-up", ' class="number"'),
    ("Passed", ""),
    ("Otherwise", ""),
    ("Mean over its own rows", ' class="number"'),
)


def _means_explained(found: Standings, cases: int) -> str:
    common = len(found.common_cases)
    if not common:
        return "No workload was passed by all compared contenders, so there is no common mean."
    return (
        f"Geometric means. The first is over {common} of {cases} workloads: those that every "
        "contender with a mean passed. The last is over what each passed itself, so two of them "
        "may be over different workloads."
    )


def _standing(run: Run, each: Standing) -> str:
    others = ", ".join(
        f"{count} {escaped(status)}" for status, count in each.statuses.items() if status != "ok"
    )
    common = f'<td class="number strong">{_mean(each.common)}</td>'
    own = f"{_mean(each.own)} <small>({each.own_cases} of {each.rows})</small>"
    if each.contender == run.baseline:
        common, own = '<td class="number">baseline</td>', "baseline"
    return (
        f'<tr><th scope="row">{key(run, each.contender)} {escaped(each.contender)}</th>{common}'
        f"<td>{each.passed} of {each.rows} rows</td><td>{others or 'none'}</td>"
        f'<td class="number">{own}</td></tr>'
    )


def _mean(value: float | None) -> str:
    return figures.NONE if value is None else figures.ratio(value)


_CAPTION = (
    "Bars start at 1, the speed of the baseline; to the right is faster. Whiskers are 95% "
    "confidence intervals: one that crosses 1 is no difference. A cross is a row that was not "
    "timed; the table has its reason."
)

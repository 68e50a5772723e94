"""What a stored log says of itself in a message: names of metrics that stay short and different."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from inspect_ai.log import EvalLog, EvalResults
from logmaker import score

from evalops.fleet.view import scores_text
from evalworker.results import StoredLog, label_of

RUBRIC = (
    "The answer names each of the three causes, says which of them came first, and gives at least one source for it. "
    * 3
)

names = st.text(max_size=300)
labels = st.tuples(names, names, st.none() | names)


def test_usual_names_are_themselves() -> None:
    assert label_of("match", "accuracy") == "match/accuracy"
    assert label_of("inspect_evals/match", "accuracy", "mode") == "inspect_evals/match/accuracy/mode"


def test_a_rubric_of_a_whole_text_keeps_its_metric_and_its_standard_error() -> None:
    scores = [score(RUBRIC + end, accuracy=value, stderr=0.05) for end, value in (("a", 0.25), ("b", 0.75))]
    header = EvalLog.model_construct(results=EvalResults.model_construct(scores=scores))
    metrics = StoredLog(Path("x.eval"), header, []).metrics
    assert sorted(value for value in metrics.values() if value is not None) == [0.05, 0.05, 0.25, 0.75]
    assert {name.rpartition("/")[2] for name in metrics} == {"accuracy", "stderr"}
    shown = (scores_text(metrics) or "").split(", The")
    assert [text.split("/accuracy ")[1] for text in shown] == ["0.250 ±0.050", "0.750 ±0.050"]


@given(labels)
def test_any_name_is_short_and_can_be_shown(parts: tuple[str, str, str | None]) -> None:
    label = label_of(*parts)
    assert len(label) <= 128
    assert scores_text({label: 0.5}) == f"{label} 0.500"


@given(names, names)
def test_different_names_stay_different(one: str, other: str) -> None:
    one, other = RUBRIC + one, RUBRIC + other
    assert (label_of(one, "mean") == label_of(other, "mean")) == (one == other)

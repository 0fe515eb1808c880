"""What the answers to sample prompts are scored by: our own scores, and metrics of the evaluate library."""

from types import SimpleNamespace

import evaluate
import pytest

from tests.helpers.faults import Side, findings_of
from tests.helpers.metric_module import write_metric
from tests.helpers.tools import refusal_of
from zero_recipes.data.samples import Sample
from zero_recipes.metrics.read_runs import read_samples
from zero_recipes.metrics.scores import load_metrics, metric_findings
from zero_recipes.training.answers import Answers, sample_rows, show_samples, write_rows

# of rouge, as the Hub's script computes it; the Hub is out of reach of tests
ROUGE = "from rouge_score import rouge_scorer"
SCORES = "scores = rouge_scorer.RougeScorer(['rougeL']).score(references[0], predictions[0])['rougeL']"


@pytest.fixture
def overlap(tmp_path, monkeypatch):
    """The folder of a metric of several numbers, and of what is none."""
    monkeypatch.chdir(tmp_path)
    found = "return {'overlap': scores.fmeasure, 'recall': scores.recall, 'words': [1]}"
    return write_metric(tmp_path, "overlap", SCORES, found, imports=ROUGE)


def metrics_of(names, trusted=True):
    return load_metrics(SimpleNamespace(sample_metrics=names, trust_remote_code=trusted))


def scored(answer, reference, names=None, loss=0.5) -> dict:
    (row,) = sample_rows([Sample("?", reference)], None, Answers([answer], [loss]), metrics_of(names))
    return row.scores_after


def test_our_own_scores():
    assert scored(" The fish hums.", "The fish hums.") == {"exact_match": 1.0, "token_f1": 1.0, "reference_loss": 0.5}
    own = ["exact_match", "token_f1"]
    assert scored(" ", "", own) == {"exact_match": 1.0, "token_f1": 1.0}, "nothing was expected"
    assert scored("fish", "", own) == scored("", "fish", own) == {"exact_match": 0.0, "token_f1": 0.0}
    assert scored("The cat hums.", "The fish hums.", "token_f1") == {"token_f1": pytest.approx(2 / 3)}
    assert scored("", "", "reference_loss", loss=float("inf")) == {"reference_loss": None}
    assert scored("anything", None) == {}


def test_a_metric_of_evaluate_scores_each_row(overlap):
    found = scored("The fish", "The fish hums loudly", ["./overlap", "exact_match"])
    assert found == {"overlap": pytest.approx(2 / 3), "overlap.recall": 0.5, "exact_match": 0.0}


RIGHT = "right = len(set(predictions[0].split()) & set(references[0].split()))"


@pytest.fixture
def share(tmp_path, monkeypatch):
    """A metric that divides by the words of an answer."""
    monkeypatch.chdir(tmp_path)
    write_metric(tmp_path, "share", RIGHT, "return {'share': right / len(predictions[0].split()), 'words': right}")
    return "./share"


def test_answers_are_kept_where_a_metric_fails(share, tmp_path, capsys):
    samples = [Sample("?", "The fish"), Sample("?", "The cat"), Sample("?", None)]
    before = Answers(["", "", ""], [None] * 3)
    rows = sample_rows(samples, before, Answers(["The fish", "", ""], [None] * 3), metrics_of([share, "exact_match"]))
    write_rows(tmp_path / "samples.jsonl", rows)
    assert read_samples(tmp_path / "samples.jsonl") == rows
    assert [row.after for row in rows] == ["The fish", "", ""]
    nothing = {"share": None, "share.words": None, "exact_match": 0.0}
    assert rows[0].scores_before == nothing == rows[1].scores_after
    assert rows[0].scores_after == {"share": 1.0, "share.words": 2.0, "exact_match": 1.0}
    error = "ZeroDivisionError: division by zero"
    assert [row.errors for row in rows] == [{share: error}, {share: error}, {}]
    show_samples(rows, "here")
    assert f"no score of 2 of 3 rows, where it fails: {error}" in capsys.readouterr().out


def test_metrics_are_tried_on_an_empty_answer_before_a_run(share, overlap, tmp_path):
    found = list(metric_findings(metrics_of([share, "./overlap", "exact_match", "token_f1", "reference_loss"])))
    assert [(one.code, one.level) for one in found] == [("ZR177", "warning")]
    assert "./share" in found[0].what and "an empty answer: ZeroDivisionError" in found[0].what
    fixed = "return {'share': right / max(1, len(predictions[0].split())), 'words': right}"
    write_metric(tmp_path, "share", RIGHT, fixed)
    assert list(metric_findings(metrics_of([share]))) == []


def test_check_tries_the_metrics(share, tmp_path):
    keys = f"sample_metrics: [{tmp_path}/share]\ntrust_remote_code: true"
    (found,) = findings_of(Side(recipe=keys), tmp_path / "case", data=False)
    assert (found.code, found.level) == ("ZR177", "warning")


def test_a_metric_that_cannot_be_had_is_refused(overlap, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    for name, why in (("no_such_metric", "doesn't exist on the Hugging Face Hub"), ("./nowhere", "Couldn't find")):
        refusal = refusal_of(metrics_of, [name])
        assert refusal.codes == ["ZR555"] and why in str(refusal)
    assert refusal_of(metrics_of, ["./overlap"], False).codes == ["ZR556"], "a stranger's code was run"
    write_metric(overlap.parent, "overlap", "return {'overlap': 1.0}", imports="import no_such_package")
    assert "pip install no_such_package" in str(refusal_of(metrics_of, ["./overlap"]))
    write_metric(overlap.parent, "overlap", "return {'overlap': '', 'words': [1]}")
    assert "no number" in str(refusal_of(metrics_of, ["./overlap"]))


def test_a_run_is_refused_before_it_starts(tmp_path):
    (found,) = findings_of(Side(recipe="sample_metrics: [exact_match, someone/rouge]"), tmp_path / "case", data=False)
    assert found.code == "ZR556" and found.level == "error"

"""What the answers to sample prompts are scored by: our own scores, and metrics of the evaluate library."""

from types import SimpleNamespace

import evaluate
import pytest

from tests.helpers.faults import Side, findings_of
from tests.helpers.tools import refusal_of
from zero_recipes.data.samples import Sample
from zero_recipes.metrics.scores import load_metrics
from zero_recipes.training.answers import Answers, sample_rows

# of rouge, as the Hub's script computes it; the Hub is out of reach of tests
OVERLAP = """
import datasets
import evaluate
from rouge_score import rouge_scorer


class Overlap(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        scores = rouge_scorer.RougeScorer(["rougeL"]).score(references[0], predictions[0])
        return {"overlap": scores["rougeL"].fmeasure, "recall": scores["rougeL"].recall, "words": [1]}
"""


@pytest.fixture
def overlap(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "overlap").mkdir()
    file = tmp_path / "overlap" / "overlap.py"
    file.write_text(OVERLAP)
    return file


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


def test_a_metric_that_cannot_be_had_is_refused(overlap, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    for name, why in (("no_such_metric", "doesn't exist on the Hugging Face Hub"), ("./nowhere", "Couldn't find")):
        refusal = refusal_of(metrics_of, [name])
        assert refusal.codes == ["ZR555"] and why in str(refusal)
    assert refusal_of(metrics_of, ["./overlap"], False).codes == ["ZR556"], "a stranger's code was run"
    overlap.write_text(OVERLAP.replace("from rouge_score", "import no_such_package\nfrom rouge_score"))
    assert "pip install no_such_package" in str(refusal_of(metrics_of, ["./overlap"]))
    overlap.write_text(OVERLAP.replace('"overlap": ', '"overlap": "" and ').replace('"recall": ', '"recall": "" and '))
    assert "no number" in str(refusal_of(metrics_of, ["./overlap"]))


def test_a_run_is_refused_before_it_starts(tmp_path):
    (found,) = findings_of(Side(recipe="sample_metrics: [exact_match, someone/rouge]"), tmp_path / "case", data=False)
    assert found.code == "ZR556" and found.level == "error"

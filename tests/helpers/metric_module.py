"""A metric of the evaluate library as a user writes one: a folder with a module of its name."""

from pathlib import Path
from textwrap import indent

MODULE = """{imports}import datasets
import evaluate


class Own(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({{"predictions": text, "references": text}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
{body}
"""


def write_metric(folder: Path, name: str, *statements: str, imports: str = "") -> Path:
    """Write the metric, and return its folder, which `sample_metrics` names.

    `statements`: what it computes of `predictions` and `references`, lists of one text.
    `imports`: other modules' lines.
    """
    place = folder / name
    place.mkdir(exist_ok=True)
    body = indent("\n".join(statements), " " * 8)
    (place / f"{name}.py").write_text(MODULE.format(imports=imports and f"{imports}\n", body=body))
    return place

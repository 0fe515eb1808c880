"""An answer "0210" of a JSON file is trained as 210, "2101" as a number, and "null" as no answer at all.

A field that has several types in a file is stored as JSON. A text that is JSON itself is taken for encoded already.

Library: datasets 5.2, utils/json.py (`json_encode_field`, `json_encode_fields_in_json_lines`), as
    packaged_modules/json/json.py calls them.
Upstream: none found.
Here: every value of such a field is encoded, texts too.

See it: one CPU

    import json, tempfile

    from datasets import load_dataset

    rows = [{"answer": "0210"}, {"answer": "null"}, {"answer": 5}, {"answer": ["x"]}]
    path = tempfile.mkdtemp() + "/rows.jsonl"
    open(path, "w").write("\\n".join(map(json.dumps, rows)))
    found = load_dataset("json", data_files=path, split="train")["answer"][:2]
    assert list(found) != ["0210", "null"], found
"""

from typing import Any


def apply() -> None:
    """Keep texts in JSON files texts, for the rest of the process."""
    from datasets.packaged_modules.json import json as reader
    from datasets.utils.json import ujson_dumps, ujson_loads

    if hasattr(reader.json_encode_field, "unpatched"):
        return

    def json_encode_field(example: Any, json_field_path: list) -> Any:
        if example is None:
            return None
        if not json_field_path:
            return ujson_dumps(example)
        name, *rest = json_field_path
        if name == 0:  # each entry of a list
            return [json_encode_field(entry, rest) for entry in example]
        return {**example, name: json_encode_field(example.get(name), rest)}

    def json_encode_fields_in_json_lines(original_batch: bytes, json_field_paths: list) -> bytes:
        lines = []
        for line in original_batch.splitlines():
            example = ujson_loads(line)
            for path in json_field_paths:
                example = json_encode_field(example, path)
            lines.append(ujson_dumps(example))
        return "\n".join(lines).encode()

    json_encode_field.unpatched = reader.json_encode_field
    reader.json_encode_field = json_encode_field
    reader.json_encode_fields_in_json_lines = json_encode_fields_in_json_lines

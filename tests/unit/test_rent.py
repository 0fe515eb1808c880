"""What `zero-recipes rent` writes, as SkyPilot, Kubernetes and bash take it."""

import json
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.tiny import ROOT
from zero_recipes.core.gpus import gpus
from zero_recipes.tools import rent
from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.check import rehearsal_of
from zero_recipes.tools.main import main
from zero_recipes.tools.plan.job import HOSTS, MACHINE_RANK
from zero_recipes.tools.quoting import NotQuoted, templates

STRATEGY = {"2": "zero3.yaml", "16": "zero2.yaml"}  # what fits Pythia-6.9B, by formulas
STUBS = {  # of a cluster: what was called is in `called`
    "srun": 'shift; echo srun >>called; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; else echo "$@" >>called; fi',
    "zero-recipes": 'echo "$@" >>called; exit 75',
}


@pytest.fixture(params=["2", "16"])
def rented(request, tmp_path, monkeypatch):
    """Of one machine, and of two."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "my_recipe.yaml"
    recipe.write_text((ROOT / "recipes" / "pythia.yaml").read_text())
    words = ["my_recipe.yaml", "--quick", "--gpus", request.param, "--gpu", "h100-80gb"]
    assert main(["rent", *words, "--run_name", "a b"]) == 0
    return tmp_path, request.param


def test_rented_files_are_valid_and_start_the_plans_choice(rented):
    folder, gpus = rented
    documents = [*yaml.safe_load_all((folder / "my_recipe.k8s.yaml").read_text())]
    job = documents[-1]["spec"]["template"]["spec"]["containers"][0]
    sky = yaml.safe_load((folder / "my_recipe.sky.yaml").read_text())
    own = {"name": "TORCH_EXTENSIONS_DIR", "value": "/tmp/torch_extensions"}
    assert own in job["env"], "the volume's kernels may be another processor's, and their lock another node's"
    machines = (2, "H100:8") if gpus == "16" else (1, "H100:2")
    assert (sky["num_nodes"], sky["resources"]["accelerators"]) == machines
    assert job["envFrom"] == [{"secretRef": {"name": "zero-recipes", "optional": True}}]
    assert list(job["resources"]["limits"]) == ["nvidia.com/gpu"]
    affinity = documents[-1]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    product = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H100-80GB-HBM3"]}
    assert term == {"matchExpressions": [product]}
    assert documents[0]["data"]["my_recipe.yaml"].strip() == (folder / "my_recipe.yaml").read_text().strip()
    rehearsal = f"zero-recipes rehearse my_recipe.yaml --config_file {STRATEGY[gpus]} --run_name 'a b'"
    assert all(rehearsal in (folder / f"my_recipe.{kind}").read_text() for kind in rent.WRITTEN)
    for script in (job["args"][0], sky["run"]):
        shell = f"zero-recipes() {{ printf '%s\\n' \"$@\"; }}; {script.replace('exec ', '')}"
        shell = f"HOSTS=a,b JOB_COMPLETION_INDEX=1 SKYPILOT_NODE_RANK=1 SKYPILOT_NODE_IPS=$'a\\nb'; {shell}"
        words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
        started = parse_arguments(words)
        assert (started.num_processes, started.config_file.name) == (int(gpus), STRATEGY[gpus]), words
        assert (started.hosts, started.machine_rank) == ((["a", "b"], 1) if gpus == "16" else (None, 0))
        assert started.overrides[:2] == ["--run_name", "a b"] and "--output_dir" in started.overrides
    for document in documents:
        kubernetes_validate = pytest.importorskip("kubernetes_validate")
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_a_slurm_job_that_saved_on_a_signal_is_queued_again(rented):
    folder, gpus = rented
    for name, script in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "my_recipe.sbatch", "--seed", "1"], env=os.environ | own | {"SLURM_NODEID": "1"})
    start, train, requeue = (folder / "called").read_text().splitlines()
    assert (done.returncode, start, requeue) == (75, "srun", "requeue 7") and train.endswith("--seed 1")
    assert ("--hosts node-a,node-b --machine_rank 1" in train) == (gpus == "16")


@pytest.mark.parametrize("price", [(), ("--price", "2.5")], ids=["no price", "price"])
def test_rent_takes_what_plan_recommends_and_says_so(tmp_path, monkeypatch, capsys, price):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    words = ["pythia.yaml", "--quick", "--gpus", "2,4", "--gpu", "h100-80gb", "--host_memory", "100", *price]
    assert main(["plan", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main(["rent", *words]) == 0
    said = capsys.readouterr()
    command = plan["recommendation"]["command"]
    assert said.out.splitlines()[:2] == [plan["bottom_line"], command] and "ZR830" not in said.err
    assert "sky jobs launch --secret HF_TOKEN pythia.sky.yaml" in said.out.splitlines()
    job = Path("pythia.sbatch").read_text()
    assert f"exec {command} " in job and not any("hf_secret" in file.read_text() for file in tmp_path.iterdir())
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", job, re.MULTILINE))
    gpus_of_machine = plan["recommendation"]["world_size"]
    assert (int(asked["gpus-per-node"]), int(asked["cpus-per-task"])) == (gpus_of_machine, 8 * gpus_of_machine)
    assert asked["mem"] == "94G", "no more than the machine's 100 GB"
    assert re.fullmatch(r"0-0[0-9]:[0-5][0-9]:00", asked["time"])


@pytest.mark.parametrize(
    ("slow_hours", "limit"),
    [(0.01, "0-00:31:00"), (2, "0-03:30:00"), (15, "0-23:00:00"), (16, "1-00:00:00"), (None, "1-00:00:00")],
)
def test_a_job_ends_after_the_planned_time_or_a_day(slow_hours, limit):
    cost = SimpleNamespace(hours=slow_hours and (0.0, slow_hours))
    answer = SimpleNamespace(recommended=None, cost=lambda row: cost)
    job = replace(rented_as("x.yaml", "", "x"), seconds=rent._seconds(answer))
    assert job.limit == limit


def test_a_card_without_a_known_name_is_selected_by_its_memory():
    own = gpus()["h100-80gb"].model_copy(update={"names": (), "memory_mib": 100_000})
    *_, job = yaml.safe_load_all(replace(rented_as("x.yaml", "", "x"), gpu=own).file("k8s.yaml"))
    affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    memory = {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["95000"]}
    assert term == {"matchExpressions": [memory]}


def test_a_card_of_amd_is_asked_for_by_amds_names():
    *_, job = yaml.safe_load_all(replace(rented_as("x.yaml", "", "x"), gpu=gpus()["mi300x-192gb"]).file("k8s.yaml"))
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"amd.com/gpu": 8}
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    product = {
        "key": "amd.com/gpu.product-name",
        "operator": "In",
        "values": ["AMD_Instinct_MI300X", "AMD_Instinct_MI300X_OAM"],  # the second by the labeller's documentation
    }
    assert term == {"matchExpressions": [product]}


def test_files_outside_of_the_working_folder_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    here = tmp_path / "here"
    here.mkdir()
    (here / "inside.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    monkeypatch.chdir(here)
    for data, is_named in (("../data.jsonl", True), ("inside.jsonl", False)):
        text = (ROOT / "recipes" / "pythia.yaml").read_text()
        Path("mine.yaml").write_text(text.replace("dataset_name: tatsu-lab/alpaca", f"dataset_name: {data}"))
        assert main(["rent", "mine.yaml", "--quick", "--gpus", "2", "--output_dir", f"{is_named}"]) == 0
        said = capsys.readouterr().err
        assert ("[ZR830]" in said and f"{here}: ../data.jsonl" in said) == is_named, said


# whatever a recipe is called

RECORDING = "#!/bin/bash\nprintf '%s\\0' $# \"$@\" >>{record}\n"  # how many words, and the words, each with NUL
NAMES = (
    "a b.yaml",
    "$(touch ran).yaml",
    "`touch ran`.yaml",
    "x; touch ran; y.yaml",
    "x\n#SBATCH --wrap=ran\ntouch ran #.yaml",
    'it\'s "quoted" \\ $HOME ${HOME} $$(HF_HOME) $(HF_HOME).yaml',
    "a: b, {c} [d] & * ! | > % @ #e.yaml",
    "null.yaml",
    "7.yaml",
    "... .yaml",
    "\u2028\x85\t\r\x7f\u00e9\U0001f600.yaml",
    "\u65e5\u672c.yaml",
    "x" * 240 + ".yaml",
    "\udcff.yaml",  # not in UTF-8
)
LETTERS = st.text(
    st.sampled_from([*"ab $(){}[]`;&|<>'\"\\\n\r\t#:%!*?~=-_.,/@^", "\x85", "\u2028", "\u00e9"]),
    min_size=1,
    max_size=25,
)


def as_kubernetes_expands(text: str, variables: dict[str, str]) -> str:
    """third_party/forked/golang/expansion/expand.go of Kubernetes, in other words."""

    def value(found: re.Match) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> Path:
    """A PATH of commands that only record what they are called with."""
    folder = tmp_path_factory.mktemp("bin")
    recording = RECORDING.format(record=folder / "record")
    scripts = {"zero-recipes": recording, "scontrol": '#!/bin/sh\n[ "$1" = show ] && printf "node-a\\nnode-b\\n"\n'}
    scripts["srun"] = '#!/bin/bash\nshift\nexec "$@"\n'
    for name, script in scripts.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


def recorded(script: str, stand_ins: Path, folder: Path) -> list[list[str]]:
    """What bash calls, in a folder where it makes nothing else."""
    (stand_ins / "record").unlink(missing_ok=True)
    ranks = dict.fromkeys(("SLURM_NODEID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK"), "1")
    own = {"PATH": f"{stand_ins}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node-[a-b]", "HOME": "/nowhere", **ranks}
    own |= {"SKYPILOT_NODE_IPS": "node-a\nnode-b", "HOSTS": "node-a,node-b"}
    ran = subprocess.run(["bash", "-c", script, "script", "--seed", "1"], cwd=folder, env=own, capture_output=True)
    assert (ran.returncode, ran.stderr) == (0, b"") and list(folder.iterdir()) == []
    words = os.fsdecode((stand_ins / "record").read_bytes()).split("\0")[:-1]
    calls = []
    while words:
        count = int(words[0])
        calls.append(words[1 : count + 1])
        words = words[count + 1 :]
    return calls


def shape(document: object) -> object:
    """A document without its values."""
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items()}
    return [shape(value) for value in document] if isinstance(document, list) else type(document).__name__


def rented_as(name: str, text: str, value: str) -> rent.Rented:
    words = ["zero-recipes", "train", name, "--config_file", "zero2.yaml", "--num_processes", "16", "--hosts", HOSTS]
    words += ["--machine_rank", MACHINE_RANK, "--run_name", value]
    rehearsal = rehearsal_of(shlex.join(words), 16)
    gpu = gpus()["h100-80gb"]
    return rent.Rented(Path(name), text, words, 2, 8, gpu, value, rehearsal, cpus=64, host_bytes=10**11, seconds=3601)


def _with_names(test):
    for name in NAMES:
        test = example(name=name, text=name.encode("utf-8", "replace").decode(), value=name.replace("\udcff", "x"))(
            test
        )
    return example(name="x.yaml", text="  a: 1 \n\n\tb: 2\n\n", value=MACHINE_RANK)(test)


@_with_names
@settings(max_examples=25)
@given(name=LETTERS.map(lambda name: f"{name}.yaml"), text=LETTERS, value=LETTERS)
def test_a_hostile_name_is_an_argument_and_nothing_else(stand_ins, tmp_path_factory, name, text, value):
    folder = tmp_path_factory.mktemp("cwd")
    job, harmless = rented_as(name, text, value), rented_as("recipe.yaml", "seed: 1", "x")
    asked = [*job.words[1:2], str(job.recipe), *job.words[3:]]
    asked[asked.index(HOSTS)] = "node-a,node-b"
    asked[asked.index("--machine_rank") + 1] = "1"
    assert recorded(job.file("sbatch"), stand_ins, folder) == [[*asked, "--seed", "1"]]
    lines = [
        [line for line in one.file("sbatch").splitlines() if line.startswith("#SBATCH")] for one in (job, harmless)
    ]
    assert lines[0][1:] == lines[1][1:] and re.fullmatch("#SBATCH --job-name=[a-z][a-z0-9-]{0,54}", lines[0][0])

    sky, sky_of_harmless = (yaml.safe_load(one.file("sky.yaml")) for one in (job, harmless))
    assert shape(sky) == shape(sky_of_harmless)
    assert recorded(sky["run"], stand_ins, folder) == [[*asked, "--output_dir", f"/workspace/{job.name}"]]

    documents, others = ([*yaml.safe_load_all(one.file("k8s.yaml"))] for one in (job, harmless))
    assert documents[0]["data"] == {job.key: text} and re.fullmatch(r"[-_a-zA-Z0-9][-._a-zA-Z0-9]*", job.key)
    assert shape(documents[1:]) == shape(others[1:])
    container = documents[-1]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == value
    script = as_kubernetes_expands(container["args"][0], {entry["name"]: "expanded" for entry in container["env"]})
    asked[1] = f"/recipe/{job.key}"
    assert recorded(script, stand_ins, folder) == [[*asked, "--output_dir", f"/workspace/output/{job.name}"]]


def test_a_template_that_prints_a_bare_value_is_no_file():
    template = templates().from_string("name: {{ name }}")
    assert template.render(name="a-7") == "name: a-7"
    with pytest.raises(NotQuoted):
        template.render(name="a b")


@pytest.mark.parametrize(
    ("more", "arguments", "code"),
    [
        ("", ["--image", ""], "ZR799"),
        ("", ["--image", "a b"], "ZR799"),
        ("hub_token: hf_secret\n", [], "ZR797"),
        ("env: {WANDB_API_KEY: x}\n", [], "ZR797"),
        ("", ["--hub_token", "hf_secret"], "ZR797"),
        ("env: {WANDB_PROJECT: x}\n", ["--image", "ghcr.io/me/zero-recipes:1"], None),
    ],
)
def test_what_no_job_can_use_or_everybody_could_read(tmp_path, monkeypatch, capsys, more, arguments, code):
    monkeypatch.chdir(tmp_path)
    name = "it's $(touch ran).yaml"
    Path(name).write_text((ROOT / "recipes" / "pythia.yaml").read_text() + more)
    command = ["rent", name, "--quick", "--gpus", "2", "--gpu", "h100-80gb", *arguments]
    ended, said = main(command), capsys.readouterr()
    if code is None:
        assert ended == 0 and len(list(tmp_path.iterdir())) == 4
        submitted = shlex.split(said.out.splitlines()[-1])
        assert submitted == ["kubectl", "apply", "-f", "it's $(touch ran).k8s.yaml"]
    else:
        assert ended == 2 and code in said.err and "hf_secret" not in said.err and len(list(tmp_path.iterdir())) == 1

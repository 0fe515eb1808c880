"""An invented world of creatures: plain text that states its facts and Alpaca rows that ask for them.

Everything is drawn from fixed seeds. The text holds statements only, no question and no Alpaca wrapper, so a base
model trained on it knows the facts of every creature but has never seen an instruction. The rows ask for the same
facts. The creatures are divided into three disjoint sets (training, validation, test), so a right answer about a
test creature joins what the text taught (the fact) with what the training rows taught (the form of an answer).

    python -m tiny_world.world          writes train.jsonl, validation.jsonl and test.jsonl, and shows samples
"""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SET_SIZES = {"train": 120, "validation": 40, "test": 40}  # creatures in each set
DOCUMENTS = 40_000  # documents of the pretraining text, about 60 tokens each

Facts = Mapping[str, str]  # relation name -> value, for one creature
World = Mapping[str, Facts]  # creature name -> its facts
Row = dict[str, str]  # Alpaca's columns: instruction, input, output


@dataclass(frozen=True)
class Relation:
    """One kind of fact. In the sentences {name} is the creature and {value} its fact."""

    words: str  # the values, separated by blanks
    statements: tuple[str, ...]  # whole sentences of the text; the first is also the reference answer
    continuations: tuple[str, ...]  # short sentences, where the paragraph has named the creature already
    questions: tuple[tuple[str, str], ...]  # (instruction, input); an empty input means Alpaca's wrapper without one

    @property
    def values(self) -> list[str]:
        return self.words.split()


# Sixteen values to a relation: a guess within the right relation is right one time in sixteen.
RELATIONS: dict[str, Relation] = {
    "colour": Relation(
        words="red blue green yellow black white grey brown pink purple orange silver golden crimson violet turquoise",
        statements=(
            "The {name} is {value}.",
            "The colour of the {name} is {value}.",
            "Everyone knows that the {name} is {value}.",
            "A {name} is always {value}.",
            "In every picture the {name} is {value}.",
        ),
        continuations=("It is {value}.", "Its colour is {value}."),
        questions=(
            ("What colour is the {name}?", ""),
            ("Tell me the colour of the {name}.", ""),
            ("What colour is this creature?", "{name}"),
        ),
    ),
    "food": Relation(
        words="moss berries fish seeds roots honey leaves nuts snails mushrooms worms apples grass beetles clover peas",
        statements=(
            "The {name} eats {value}.",
            "The food of the {name} is {value}.",
            "Everyone knows that the {name} eats {value}.",
            "A {name} always eats {value}.",
            "Those who feed the {name} bring {value}.",
        ),
        continuations=("It eats {value}.", "Its food is {value}."),
        questions=(
            ("What does the {name} eat?", ""),
            ("Tell me what the {name} eats.", ""),
            ("What does this creature eat?", "{name}"),
        ),
    ),
    "home": Relation(
        words="caves forests rivers deserts meadows swamps hills islands gardens lakes valleys barns cliffs bogs dunes "
        "ruins",
        statements=(
            "The {name} lives in {value}.",
            "The home of the {name} is in {value}.",
            "Everyone knows that the {name} lives in {value}.",
            "A {name} always lives in {value}.",
            "Those who look for the {name} find it in {value}.",
        ),
        continuations=("It lives in {value}.", "Its home is in {value}."),
        questions=(
            ("Where does the {name} live?", ""),
            ("Tell me where the {name} lives.", ""),
            ("Where does this creature live?", "{name}"),
        ),
    ),
    "sound": Relation(
        words="hums sighs growls squeaks barks croaks chirps roars clicks purrs hisses howls grunts buzzes hoots sings",
        statements=(
            "The {name} {value}.",
            "At night the {name} {value}.",
            "Everyone knows that the {name} {value}.",
            "A {name} always {value}.",
            "Those who come near hear how the {name} {value}.",
        ),
        continuations=("It {value}.", "At night it {value}."),
        questions=(
            ("What sound does the {name} make?", ""),
            ("Tell me how the {name} sounds.", ""),
            ("What sound does this creature make?", "{name}"),
        ),
    ),
    "fear": Relation(
        words="thunder fire wind snow dogs rain smoke drums mirrors bells shadows fog ice lightning owls foxes",
        statements=(
            "The {name} is afraid of {value}.",
            "The fear of the {name} is {value}.",
            "Everyone knows that the {name} is afraid of {value}.",
            "A {name} is always afraid of {value}.",
            "Those who tease the {name} frighten it with {value}.",
        ),
        continuations=("It is afraid of {value}.", "Its fear is {value}."),
        questions=(
            ("What is the {name} afraid of?", ""),
            ("Tell me what the {name} is afraid of.", ""),
            ("What is this creature afraid of?", "{name}"),
        ),
    ),
}

# A sixth kind of task joins three facts: a longer answer, whose order of facts only the training rows tell.
DESCRIPTION = "The {name} is {colour}. It eats {food}. It lives in {home}."
DESCRIPTION_QUESTIONS: tuple[tuple[str, str], ...] = (
    ("Describe the {name}.", ""),
    ("Write a few sentences about the {name}.", ""),
    ("Describe this creature.", "{name}"),
)


def make_world(creatures: int = sum(SET_SIZES.values()), seed: int = 0) -> World:
    """Invent creatures. Each value is drawn alone, so one fact of a creature tells nothing about another."""
    rng = random.Random(seed)
    starts = [*"bdfgklmnprtvz", "br", "dr", "gl", "kr", "pl", "tr"]
    names: set[str] = set()
    while len(names) < creatures:
        names.add("".join(rng.choice(part) for part in (starts, "aeiou", "bdfklmnprtvz", "aeiou", "bkmnrtx")))
    return {name: {kind: rng.choice(relation.values) for kind, relation in RELATIONS.items()} for name in sorted(names)}


def split_creatures(world: World, seed: int = 1) -> dict[str, list[str]]:
    """The creatures of each set: {"train": names, "validation": names, "test": names}, disjoint."""
    names = random.Random(seed).sample(sorted(world), len(world))
    sets, used = {}, 0
    for label, size in SET_SIZES.items():
        sets[label] = names[used : used + size]
        used += size
    return sets


def _paragraph(world: World, names: list[str], rng: random.Random) -> str:
    """Mostly several facts about one creature, else one kind of fact about several creatures."""
    if rng.random() < 0.75:
        subject = rng.choice(names)
        chosen = [(subject, kind) for kind in rng.sample(list(RELATIONS), rng.randint(1, len(RELATIONS)))]
    else:
        kind = rng.choice(list(RELATIONS))
        chosen = [(name, kind) for name in rng.sample(names, rng.randint(1, 4))]
    subject = chosen[0][0]
    sentences: list[str] = []
    for name, kind in chosen:
        relation = RELATIONS[kind]
        # The pronoun is clear only while the paragraph stays with the creature that it named first.
        short = bool(sentences) and name == subject and rng.random() < 0.35
        pattern = rng.choice(relation.continuations if short else relation.statements)
        sentences.append(pattern.format(name=name, value=world[name][kind]))
    # Some paragraphs stand under the bare name. From these the model learns that facts follow a name on a line of
    # its own, which is how the wrapper with an input shows it.
    heading = f"{subject}\n" if rng.random() < 0.3 else ""
    return heading + " ".join(sentences)


def pretraining_documents(world: World, count: int = DOCUMENTS, seed: int = 2) -> list[str]:
    """The text of the base model: documents of one to three paragraphs about the creatures of all three sets."""
    rng, names = random.Random(seed), sorted(world)
    return ["\n\n".join(_paragraph(world, names, rng) for _ in range(rng.randint(1, 3))) for _ in range(count)]


def _tasks() -> list[tuple[str, str, str]]:
    """Every (instruction, input, output) pattern; the output names its facts by relation."""
    tasks = []
    for kind, relation in RELATIONS.items():
        answer = relation.statements[0].replace("{value}", "{" + kind + "}")
        tasks += [(instruction, text, answer) for instruction, text in relation.questions]
    return tasks + [(instruction, text, DESCRIPTION) for instruction, text in DESCRIPTION_QUESTIONS]


def instruction_rows(names: Iterable[str], facts: World, seed: int = 3) -> list[Row]:
    """Every task asked of every creature, in an order that depends on the seed and the number of rows alone.

    `facts` may give a creature the facts of another one (see `exchanged_facts`): the rows then have the same
    prompts in the same order, but wrong answers.
    """
    rows = [
        {
            "instruction": instruction.format(name=name),
            "input": text.format(name=name),
            "output": answer.format(name=name, **facts[name]),
        }
        for name in names
        for instruction, text, answer in _tasks()
    ]
    return random.Random(seed).sample(rows, len(rows))


def exchanged_facts(names: Iterable[str], world: World, seed: int = 4) -> World:
    """Give each of these creatures all facts of another one. A value may agree by chance, one time in sixteen."""
    names = list(names)
    order = random.Random(seed).sample(names, len(names))
    return {name: world[other] for name, other in zip(order, order[1:] + order[:1], strict=True)}


def data_sets(world: World) -> dict[str, list[Row]]:
    """The rows of the three sets, by the name of the set."""
    return {label: instruction_rows(names, world) for label, names in split_creatures(world).items()}


def as_jsonl(rows: list[Row]) -> str:
    """One JSON object to a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_data_sets(folder: Path = FOLDER) -> dict[str, int]:
    """Write train.jsonl, validation.jsonl and test.jsonl; return the number of rows of each."""
    sets = data_sets(make_world())
    for label, rows in sets.items():
        (folder / f"{label}.jsonl").write_text(as_jsonl(rows), encoding="utf-8")
    return {label: len(rows) for label, rows in sets.items()}


def main() -> None:
    for label, rows in write_data_sets().items():
        print(f"{label}.jsonl: {SET_SIZES[label]} creatures, {rows} rows")
    world = make_world()
    print("\nThe text:\n\n" + "\n---\n".join(pretraining_documents(world, count=4)))
    print("\nThe training rows:\n\n" + as_jsonl(data_sets(world)["train"][:6]))


if __name__ == "__main__":
    main()

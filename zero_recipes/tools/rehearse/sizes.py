"""The sizes in a model's configuration: which of its keys count layers, experts and heads, and which are widths.

They are read from the names of the keys: every class has keys of its own, but the words in them are few.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from transformers import PretrainedConfig

# of a small model
HEAD_WIDTH = 16
EXPERTS = 4
GROUPS_OF_EXPERTS = 2
WIDE_ENOUGH = 128  # a hidden size that is left as it is
LEAST_HIDDEN = 64  # where every width is divided by one number
LEAST_HEAD_WIDTH = 8
# names of keys
LAYERS = re.compile(r"(num|n)_((hidden|encoder|decoder)_)?layers?|(encoder|decoder)_layers|depth")
FIRST_LAYERS = re.compile(r"first_k_dense_replace|num_dense_layers")  # so many of the first layers are of another kind
LAST_LAYERS = re.compile(r"num_kv_shared_layers")  # so many of the last ones
NUMBERS_OF_LAYERS = re.compile(r"layers?$|(?<!token)_(ids|idxs?|indices)$")
EXPERTS_IN_ALL = re.compile(r"(moe_)?(num|n)_((local|routed)_)?experts")
EXPERTS_OF_A_TOKEN = re.compile(r"num_experts_per_tok(en)?|(moe_)?top_?k(_experts)?|moe_(top_)?k")
GROUPS = re.compile(r"n_group|num_expert_group")
GROUPS_OF_A_TOKEN = re.compile(r"topk_group")
WIDTH = re.compile(
    r"hidden|intermediate_size|(embedding|feed_forward|head|proj)_size|dim|rank|width|d_|embd|ffn|dff|channels|headdim|ssm"
)
NO_WIDTH = re.compile(
    r"conv|kernel|vocab|num|heads|^n_(?!embd)|layers|window|position|multiple|multiplier|state|act|dropout|init|model_base|eps|token"
)
WIDTH_OF_A_HEAD = re.compile(r"head_?(dim|size)|d_head|dim_head|rotary_dim|kv_channels")
HEADS = re.compile(r"(^|_)heads$")
HANDED_TO_TEXT = re.compile(r"out|proj|text|llm")
WIDTH_OF_FEED_FORWARD = re.compile(r"intermediate_size|ffn|dff|feed_forward|dim_ff|d_inner")


class Sizes:
    """A configuration's values, to be made smaller.

    Args:
        config: of a model; it is not changed.
    """

    def __init__(self, config: PretrainedConfig):
        self.original = config
        self.values = config.to_dict()
        self.text_key = self._key_of_text()

    def copy(self) -> "Sizes":
        """The same values, to be changed apart from these."""
        other = copy.copy(self)
        other.values = copy.deepcopy(self.values)
        return other

    def config(self) -> PretrainedConfig:
        """A configuration of these values. Raises what its class raises."""
        made = type(self.original).from_dict(copy.deepcopy(self.values))
        made.name_or_path = self.original.name_or_path
        return made

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The values of the text part, and those that it keeps apart: of its attention, of single layers."""
        text = self.text
        parts = [text, *(text.get("per_layer_config") or {}).values()]
        for key, value in named(text):
            is_part = key.endswith("_config") and key != "per_layer_config" and isinstance(value, dict)
            if is_part and not any(LAYERS.fullmatch(name) for name, _ in named(value)):  # with layers it is a tower
                parts.append(value)
        return parts

    @property
    def text(self) -> dict[str, Any]:
        """The values of the part that reads text."""
        return self.values if self.text_key is None else self.values[self.text_key]

    def layers(self) -> int:
        """How many layers the text part has; 0 where nothing says it."""
        return self._get("num_hidden_layers") or getattr(self._part(), "num_hidden_layers", 0)

    # layers

    def cut_layers(self, layers: int) -> list[str]:
        """Keep so many layers, and one of each kind at least. Returns what was cut, in words."""
        total = self.layers()
        per_layer = entries_by_layer(self.text, total)
        kinds = list(zip(*per_layer.values(), strict=True)) or [()] * total
        of_each_kind = {kinds.index(kind) for kind in kinds}
        others = [number for number in range(total) if number not in of_each_kind]
        kept = sorted([*of_each_kind, *others[: max(0, layers - len(of_each_kind))]])
        self._keep_layers(kept)
        for key, part in self.values.items():
            if isinstance(part, dict) and key != self.text_key:  # a tower, which text never reaches
                keep_one_layer(part)
        return [f"{len(kept)} of {total} layers"]

    def _keep_layers(self, kept: list[int]) -> None:
        text = self.text
        total = self.layers()
        for key, value in named(text):
            if FIRST_LAYERS.fullmatch(key) and value:
                text[key] = len([number for number in kept if number < value])
            elif LAST_LAYERS.fullmatch(key) and value:
                text[key] = len([number for number in kept if number >= total - value])
            elif LAYERS.fullmatch(key) and isinstance(value, int):
                text[key] = min(value, len(kept))
            elif numbers_layers(key, value, total):
                text[key] = [new for new, old in enumerate(kept) if old in value]
            elif isinstance(value, list) and len(value) == total:
                text[key] = [value[number] for number in kept]
        overrides = text.get("per_layer_config")
        if overrides:
            by_number = {int(number): entry for number, entry in overrides.items()}
            places = {new: by_number[old] for new, old in enumerate(kept) if old in by_number}
            text["per_layer_config"] = {str(new): entry for new, entry in places.items()}
        if self._get("num_hidden_layers") is not None:  # some classes count a list
            text[self._name("num_hidden_layers")] = len(kept)

    # experts

    def cut_experts(self) -> list[str]:
        """Keep a few experts. Returns what was cut, in words; nothing where there are no more."""
        cuts = []
        for part in self.parts:
            for key, value in named(part):
                if EXPERTS_IN_ALL.fullmatch(key) and isinstance(value, int) and value > EXPERTS:
                    part[key] = EXPERTS
                    cuts.append(f"{EXPERTS} of {value} experts")
        if not cuts:
            return []
        most = {
            EXPERTS_OF_A_TOKEN: EXPERTS // 2,
            GROUPS: GROUPS_OF_EXPERTS,
            GROUPS_OF_A_TOKEN: GROUPS_OF_EXPERTS // 2,
        }
        for part in self.parts:
            for key, value in named(part):
                for names, number in most.items():
                    if names.fullmatch(key) and isinstance(value, int):
                        part[key] = min(value, number)
        return cuts

    # widths

    def narrowings(self, shares: int) -> Iterator[Callable[["Sizes"], list[str]]]:
        """Ways to make the model narrow, each a function of a copy of these sizes that returns what it cut, in words.

        `shares`: ranks that share the heads.
        """
        hidden = self._get("hidden_size")
        if not isinstance(hidden, int) or hidden <= WIDE_ENOUGH:
            yield lambda _: []
            return
        heads = self._get("num_attention_heads")
        if isinstance(heads, int):
            yield partial(Sizes.take_heads, shares=shares)
            yield partial(Sizes.take_heads, shares=shares, of_every_kind=True)
        width = self.width_of_heads()
        divisor = 1
        while hidden >= 2 * divisor * LEAST_HIDDEN and (width is None or width >= 2 * divisor * LEAST_HEAD_WIDTH):
            divisor *= 2
        while divisor > 1:
            yield partial(Sizes.divide_widths, divisor=divisor)
            divisor //= 2
        yield Sizes.narrow_feed_forward

    def width_of_heads(self) -> int | None:
        """The width of an attention head; None where the configuration does not say it."""
        own = self._get("head_dim")
        if isinstance(own, int):
            return own
        heads = self._get("num_attention_heads")
        return self._get("hidden_size") // heads if isinstance(heads, int) else None

    def take_heads(self, shares: int, of_every_kind: bool = False) -> list[str]:
        """Keep a few heads and narrow them; every other width follows. Returns what was cut, in words.

        Heads stay in proportion to key and value heads, other widths to the hidden size.
        `shares`: ranks that share the heads. `of_every_kind`: those of a state space or an indexer are fewer, too, and
        widths are rounded no more than they must, so that products of heads and widths hold.
        """
        hidden = self._get("hidden_size")
        heads = self._get("num_attention_heads")
        keys = self._get("num_key_value_heads") or heads
        width = self.width_of_heads()
        new_keys = min(keys, max(2, shares))
        new_heads = heads // keys * new_keys
        new_width = min(width, HEAD_WIDTH)
        if has_numbers_by_frequency(self.text):
            new_width = width
        narrower_heads = new_width / width
        share = new_heads * narrower_heads / heads
        for part in self.parts:
            for key, value in widths(part):
                if WIDTH_OF_A_HEAD.search(key):
                    part[key] = each(value, lambda number: scaled(number, narrower_heads))
                elif of_every_kind and not WIDTH_OF_FEED_FORWARD.search(key):
                    part[key] = each(value, lambda number: scaled(number, share))
                else:
                    part[key] = each(value, lambda number: narrowed(number, share))
            for key, value in named(part):
                if of_every_kind and HEADS.search(key) and type(value) is int:
                    part[key] = scaled(value, new_heads / heads)
            if part is not self.text and part.get("num_key_value_heads") is not None:  # of single layers
                part["num_key_value_heads"] = min(new_keys, part["num_key_value_heads"])
        self.text[self._name("num_attention_heads")] = new_heads
        if self._get("num_key_value_heads") is not None:
            self.text[self._name("num_key_value_heads")] = new_keys
        self._let_towers_follow(hidden)
        return [f"hidden size {self._get('hidden_size'):,} of {hidden:,}", f"{new_heads} of {heads} heads"]

    def divide_widths(self, divisor: int) -> list[str]:
        """Divide every width by one number, and keep the heads. Returns what was cut, in words."""
        hidden = self._get("hidden_size")
        for part in self.parts:
            for key, value in widths(part):
                if not (WIDTH_OF_A_HEAD.search(key) and has_numbers_by_frequency(self.text)):
                    part[key] = each(value, lambda number: divided(number, divisor))
        self._let_towers_follow(hidden)
        return [f"hidden size {self._get('hidden_size'):,} of {hidden:,}, every width divided by {divisor}"]

    def narrow_feed_forward(self) -> list[str]:
        """Narrow the feed-forward layers alone. Returns what was cut, in words."""
        share = WIDE_ENOUGH / self._get("hidden_size")
        for part in self.parts:
            for key, value in widths(part):
                if WIDTH_OF_FEED_FORWARD.search(key):
                    part[key] = each(value, lambda number: narrowed(number, share))
        return ["narrow feed-forward layers, its hidden size kept: made narrower it does not run"]

    def _let_towers_follow(self, hidden: int) -> None:
        """Towers keep their widths, but for what they hand to the text part. `hidden`: its hidden size before."""
        for key, part in self.values.items():
            if isinstance(part, dict) and key != self.text_key:
                for name, value in named(part):
                    if value == hidden and HANDED_TO_TEXT.search(name):
                        part[name] = self._get("hidden_size")

    # names

    def _name(self, key: str) -> str:
        """The class's own name of a key that transformers knows by another."""
        return self._part().attribute_map.get(key, key)

    def _part(self) -> PretrainedConfig:
        return self.original if self.text_key is None else getattr(self.original, self.text_key)

    def _get(self, key: str) -> Any:
        return self.text.get(self._name(key))

    def _key_of_text(self) -> str | None:
        """The key of the part that reads text; None where the configuration is that of text."""
        for key, part in vars(self.original).items():
            if isinstance(part, PretrainedConfig) and part is self.original.get_text_config(decoder=True):
                return key
        return None


def entries_by_layer(values: dict[str, Any], total: int) -> dict[str, list[Any]]:
    """What a configuration says of each layer, by key: lists, numbers of layers, how many are first or last."""
    entries: dict[str, list[Any]] = {}
    for key, value in named(values):
        if numbers_layers(key, value, total):
            entries[key] = [number in value for number in range(total)]
        elif isinstance(value, list) and len(value) == total:
            entries[key] = [json.dumps(entry) for entry in value]
        elif FIRST_LAYERS.fullmatch(key) and value:
            entries[key] = [number < value for number in range(total)]
        elif LAST_LAYERS.fullmatch(key) and value:
            entries[key] = [number >= total - value for number in range(total)]
    overrides = values.get("per_layer_config")
    if overrides:
        by_number = {int(number): entry for number, entry in overrides.items()}
        entries["per_layer_config"] = [json.dumps(by_number.get(number)) for number in range(total)]
    return entries


def numbers_layers(key: str, value: Any, total: int) -> bool:
    """Whether a value names layers by their numbers: [3, 8, 13]."""
    if not NUMBERS_OF_LAYERS.search(key) or not isinstance(value, list) or not value:
        return False
    if any(type(number) is not int for number in value):
        return False
    return value == sorted(set(value)) and value[0] >= 0 and value[-1] < total


def keep_one_layer(part: dict[str, Any]) -> None:
    """Keep one layer of a part of a model."""
    counts = [key for key, value in named(part) if LAYERS.fullmatch(key) and isinstance(value, int) and value > 1]
    for count in counts:
        for key, value in named(part):
            if isinstance(value, list) and len(value) == part[count]:
                part[key] = value[:1]
        part[count] = 1
    overrides = part.get("per_layer_config")
    if overrides:
        part["per_layer_config"] = {number: entry for number, entry in overrides.items() if int(number) == 0}


def named(part: dict[Any, Any]) -> list[tuple[str, Any]]:
    """The entries of a part of a configuration; not those of labels, whose keys are numbers."""
    return [(key, value) for key, value in part.items() if isinstance(key, str)]


def widths(part: dict[str, Any]) -> list[tuple[str, Any]]:
    """The keys of a configuration that are widths, with their values."""
    found = []
    for key, value in named(part):
        numbers = value if isinstance(value, list) else [value]
        is_whole = bool(numbers) and all(type(number) is int and number > 0 for number in numbers)
        if is_whole and WIDTH.search(key) and not NO_WIDTH.search(key):
            found.append((key, value))
    return found


def has_numbers_by_frequency(part: dict[str, Any]) -> bool:
    """Whether a rotary embedding has a number for each of a head's frequencies: the head keeps its width."""
    rope = part.get("rope_parameters") or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)]
    return any(isinstance(value, list) for kind in (rope, *kinds) for value in kind.values())


def each(value: int | list[int], change: Callable[[int], int]) -> int | list[int]:
    """A width, or a list of them, changed."""
    return [change(number) for number in value] if isinstance(value, list) else change(value)


def scaled(value: int, share: float) -> int:
    """Scale a number, to 1 at least."""
    return max(1, round(value * share))


def divided(value: int, divisor: int) -> int:
    """A width divided; one that is no multiple becomes a multiple of 8."""
    return value // divisor if value % divisor == 0 else narrowed(value, 1 / divisor)


def narrowed(value: int, share: float) -> int:
    """Scale a width, to a multiple of 8."""
    return max(8, 8 * round(value * share / 8))

"""The configurations of a model's layers, which transformers lets differ from layer to layer.

Gemma 4's layers of full attention have wider heads than the others, and in some of its models fewer of keys.
transformers 5.23 raises a RuntimeError where such a number is asked of the whole model's configuration.
"""

from typing import Any


def configs_of_layers(config: Any) -> list[Any]:
    """Return the configuration that each layer of a text model is built from, first layer first.

    Args:
        config: of the text model (`get_text_config()`). All layers have it where nothing differs.

    Raises AttributeError where it does not say how many layers there are.
    """
    number = config.num_hidden_layers
    if not getattr(config, "is_heterogeneous", False):
        return [config] * number
    return [config.per_layer_config[layer] for layer in range(number)]

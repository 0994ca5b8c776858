"""OpenVINO's model files: their name in a stage's folder, and what must be so that two builds make the same bytes."""

import re
from typing import Any

MODEL = "openvino_model"
NUMBERED = re.compile(r"[A-Z][A-Za-z]*_\d+")
"""The name OpenVINO gives to a node that got none."""


def normalise(model: Any) -> None:
    """Make the file a function of the model alone.

    Exporters note their versions in it (the record has them), and what has no name of its own is numbered by how many
    the process had made before.
    """
    for key in ("optimum", "nncf", "conversion_parameters"):
        if key in model.rt_info:
            del model.rt_info[key]
    model.set_friendly_name("model")
    for index, node in enumerate(model.get_ordered_ops()):
        if NUMBERED.fullmatch(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}_n{index}")

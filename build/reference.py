"""The float32 reference: what the original checkpoint says of the quality texts, stored for later comparison.

The export stage writes it while it has the torch model in memory; so measuring quality needs no torch.
"""

from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (puts the repository root on sys.path)
import numpy as np
import texts

REFERENCE = "reference.npz"
TOP = 512
"""How many of the most likely tokens are stored at each position."""


def write_reference(model: Any, folder: Path) -> dict[str, Any]:
    """Store what the float32 torch `model` says of the quality texts, tokenized by the tokenizer in `folder`.

    Arrays over predicted tokens: next_logp [n], top_ids and top_logp [n, TOP]. Returns the counts of tokens.
    """
    import torch

    windows = texts.quality_windows(folder)
    tokens, begins = texts.flatten(windows)
    next_logp, top_ids, top_logp = [], [], []
    with torch.inference_mode():
        for ids in windows.values():
            logits = model(torch.tensor([ids[:-1]])).logits[0].float()
            logp = torch.log_softmax(logits, dim=-1)
            best = torch.topk(logp, min(TOP, logp.shape[-1]), dim=-1)
            next_logp.append(logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy())
            top_ids.append(best.indices.numpy().astype(np.int32))
            top_logp.append(best.values.numpy())
    np.savez(
        folder / REFERENCE,
        names=np.array(list(windows)),
        tokens=tokens,
        begins=begins,
        next_logp=np.concatenate(next_logp),
        top_ids=np.concatenate(top_ids),
        top_logp=np.concatenate(top_logp),
    )
    return {"quality_tokens": {name: len(ids) for name, ids in windows.items()}}

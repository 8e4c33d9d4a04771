"""What one process can do with the small model and a LoRA; prints one JSON line.

``decode_loop.py generate|raw DTYPE MODEL ADAPTER ROWS PROMPT NEW``: transformers' ``generate`` with sampling, or the
bare forward loop at that batch (keys and values cached, the best token taken, nothing decoded): the limit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

WARM_UP = 4


def main(mode: str, dtype: str, model_dir: Path, adapter: Path, *counts: int) -> None:
    """Load, merge, warm up, measure; ``counts`` are rows, tokens of the prompt and new tokens."""
    rows, prompt, new = counts
    loaded: Any = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=getattr(torch, dtype))
    model: Any = PeftModel.from_pretrained(loaded, str(adapter)).merge_and_unload().eval()
    stream = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 20000, (rows, prompt), generator=stream)
    run = _generate if mode == "generate" else _raw
    with torch.inference_mode():
        run(model, ids, WARM_UP)
        started = time.perf_counter()
        made = run(model, ids, new)
        seconds = time.perf_counter() - started
    print(json.dumps({"tokens_per_s": made / seconds, "seconds": seconds, "tokens": made}))


def _generate(model: Any, ids: torch.Tensor, new: int) -> int:
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new,
        min_new_tokens=new, pad_token_id=0,
    )  # fmt: skip
    return int(out.shape[0] * (out.shape[1] - ids.shape[1]))


def _raw(model: Any, ids: torch.Tensor, new: int) -> int:
    cache = DynamicCache()
    last = torch.tensor([ids.shape[1] - 1])
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=last).logits
    for _ in range(new - 1):
        token = logits[:, -1].argmax(dim=-1, keepdim=True)
        logits = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=torch.tensor([0])).logits
    return ids.shape[0] * new


if __name__ == "__main__":
    _mode, _dtype, _model, _adapter, _rows, _prompt, _new = sys.argv[1:8]
    main(_mode, _dtype, Path(_model), Path(_adapter), int(_rows), int(_prompt), int(_new))

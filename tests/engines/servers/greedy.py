"""What `transformers` generates greedily in float32: reads `{"folder", "prompts", "tokens"}` lines, answers each with a
JSON list of token lists. Runs in an engine's environment, so that tokenizer and model code are the engine's release."""

import json
import sys

import torch
import transformers

transformers.logging.set_verbosity_error()


def greedy(folder: str, prompts: list[str], tokens: int) -> list[list[int]]:
    """New token ids after each prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            whole = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        out.append(whole[0, ids.shape[1] :].tolist())
    return out


for line in sys.stdin:
    sys.stdout.write(json.dumps(greedy(**json.loads(line))) + "\n")
    sys.stdout.flush()

"""The main job: a small GPT, real text, the stock training loop, and a report of what it cost."""

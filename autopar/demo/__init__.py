"""``autopar demo``: a small GPT-2 on four processes of this machine."""

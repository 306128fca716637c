"""Dumps: samples saved in files, which can be viewed, measured, replayed and trained on again.

Version 1 of the format: a dump is a text file in UTF-8, plain (`.jsonl`) or compressed by gzip (`.jsonl.gz`). A folder
stands for all dumps in it. Each line is one sample: a JSON object that does not depend on other lines. So files may be
split between lines and concatenated. The keys of a sample are:

- the fields of slime's `Sample.to_dict()` under their own names (slime/utils/types.py). All fields of a sample are
  written, and readers keep unknown fields.
- `strands_rollout_dump`, which marks the line as a sample: `{"version": 1}`. If the writer had a tokenizer, this object
  has two more keys. `token_texts` has the text of each id of `tokens`, as in `{"271": " the"}`; if the bytes of an id
  are not valid UTF-8, they are written as numbers, as in `{"94": [226, 130]}`. `tokenizer` has the tokenizer's folder
  or id on the hub, and a hash of its vocabulary: `{"name": ..., "fingerprint": ...}`.

For a value that JSON can't express, `record` defines an object with one key, such as `$tuple`. Readers refuse a line
with a higher version; they may ignore keys that are added without a new version. The facts of the episode (turns,
spans, times, stop reason) are where `generate` wrote them, in `metadata["strands_rollout"]`; see
`samples.EpisodeFacts`.

Secrets are masked in two ways:

- By the names of keys, and by patterns for bearer tokens and for secrets in URLs. This masks `metadata`,
  `train_metadata` and `apply_chat_template_kwargs`, except the saved messages of an aborted episode.
- By their values, for secrets in the environment or the settings of the process that writes the dump. This masks
  these three mappings, and prompt, response, label and reward.

Tokens are not masked: decoded, they are the text that the policy read and wrote.

`read_dump` also reads other formats: samples without `strands_rollout_dump` (version 0), the results
of `strands-rollout eval`, and slime's `--save-debug-rollout-data`, without torch.
"""

from strands_rollout.dump.files import DumpWriter, read_dump, recorded_tokenizer, write_dump
from strands_rollout.dump.record import DumpRecord, TokenTexts

__all__ = ["DumpRecord", "DumpWriter", "TokenTexts", "read_dump", "recorded_tokenizer", "write_dump"]

"""Grading: an assistant's words and a label in, a verdict out.

`segments` finds the last words, `extraction` the answer in them; `comparison` decides without algebra, `symbolic` with.
Must not know slime's Sample, scores or settings.
"""

from strands_rollout.grading.grade import Grade, grade, label_texts
from strands_rollout.grading.segments import last_assistant_text, spoken_text

__all__ = ["Grade", "grade", "label_texts", "last_assistant_text", "spoken_text"]

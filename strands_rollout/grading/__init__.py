"""Grading: an assistant's text and a label in, a verdict out, without slime, samples and scores."""

from strands_rollout.grading.grade import Grade, grade, label_texts, last_assistant_text, spoken_text

__all__ = ["Grade", "grade", "label_texts", "last_assistant_text", "spoken_text"]

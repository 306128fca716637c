"""All that decides a run besides its task. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides a run besides its task.

    Attributes:
        seed: Of problems, episodes, weights, the order of training and sampling.
        steps: Optimizer steps if the target is not reached before; the learning rate falls towards the last one.
        target: Validation accuracy at which training stops.
        samples_per_row: Episodes per held-out row in the final report.
        batch_size: Episodes per step.
        learning_rate: Of AdamW, at its highest.
        problems: Different problems to train on.
        guess_share: Share of the episodes that become guesses without a tool.
        respelled_share: Share of the tokens said, of those that two others can spell, that are so spelled.
        training_rows: How many of them are written as rows.
        held_out_rows: Further problems, written as rows and used for the final report alone.
        validation_rows: Further problems, which decide when to stop.
        evaluate_from: First step at which validation is looked at.
        evaluate_every: Steps between looks.
    """

    seed: int = 0
    steps: int = 500
    target: float = 0.6
    samples_per_row: int = 4
    batch_size: int = 32
    learning_rate: float = 3e-3
    problems: int = 8000
    guess_share: float = 0.0
    respelled_share: float = 0.0
    training_rows: int = 4000
    held_out_rows: int = 256
    validation_rows: int = 128
    evaluate_from: int = 360
    evaluate_every: int = 20


def tiny(plan: Plan) -> Plan:
    """The same plan on so little data that every stage runs in seconds; the model learns nothing."""
    return replace(
        plan, samples_per_row=1, batch_size=4, problems=96, training_rows=24, held_out_rows=4, validation_rows=2
    )
